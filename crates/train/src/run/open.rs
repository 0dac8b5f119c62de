//! Opening a run: its folder, data and model, at its beginning or at its latest checkpoint.

use super::corpus::Corpus;
use super::reference::Aside;
use super::saved::{self, Position, Saved, check_tokenizer};
use super::trainer::{Observer, Run, Start};
use super::{RunError, RunFolder, choices, fit, setup};
use crate::config::{Config, Facts, Parsed, Resolved};
use crate::engine::Processor;
use crate::evaluate::Evaluator;
use crate::exchange;
use crate::learner::Learner;
use crate::metrics::{Event, Lost, MetricsSink, Outputs, Resumed, Start as MetricsStart};
use crate::products::{LinearProducts, fp8_share, linear_products};
use crate::programs::TrainingSpec;
use crate::schedule::Schedule;
use crate::slower;
use crate::weights::LearnError;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_data::{DataError, Tokenizer};
use xtrain_model::Bf16Reason;
use xtrain_program::quantized::LinearGemm;
use xtrain_runtime::Checks;

/// What needs less memory than a run that does not fit.
const LESS: &str = "take a smaller train.micro_batch_size, a shorter data.seq_len or a smaller model";

/// What is found where a run is opened.
pub(super) enum Opened {
    /// A run with something left to do.
    Run(Box<Run>),
    /// One that has made `done` steps, no fewer than it is asked for, and has written all that its end writes.
    Finished { done: u64, steps: u64 },
}

impl Run {
    /// Opens the run of `parsed`, or refuses before anything of it is made; changes nothing of a finished one. `time_is_up` is asked
    /// while text is turned into tokens.
    pub(super) fn open(
        parsed: &Parsed,
        start: Start,
        observer: &mut dyn Observer,
        time_is_up: &dyn Fn() -> bool,
    ) -> Result<Opened, RunError> {
        let folder = RunFolder::at(parsed.out());
        let going_on = start == Start::Resume && folder.is_begun();
        if !going_on {
            check_free(&folder)?;
        }
        if parsed.config.checkpoint.export_hf {
            check_export(&folder, parsed.config.model.init_from.as_deref())?;
        }
        let hf = match going_on {
            true => setup::kept_init(&parsed.config, &folder)?,
            false => setup::init(&parsed.config)?,
        };
        let tokenizer = folder.tokenizer();
        let kept = going_on.then_some(tokenizer.as_path()).filter(|t| t.is_dir());
        let processor = Processor::of(&parsed.config)?;
        if !going_on {
            setup::check_before_text(parsed, &processor)?;
        }
        let began = if going_on { Some(saved::precision(&folder)?) } else { None };
        let corpus = Corpus::open(&parsed.config, kept, &mut |notice| match time_is_up() {
            true => ControlFlow::Break(()),
            false => observer.notice(notice),
        })?;
        let prompts = prompts(&parsed.config, &corpus.tokenizer)?;
        let facts = Facts {
            init: hf.as_ref().map(|hf| hf.model),
            tokenizer_vocab_size: Some(corpus.tokenizer.vocab_size()),
            shards: setup::shards(&parsed.config)?.map(|dataset| dataset.folder().display().to_string()),
            epoch_tokens: Some(corpus.loader.epoch_tokens()),
            // A run keeps its precision wherever it goes on.
            recipe: match &began {
                Some(began) => began.recipe,
                None => Some(processor.target().recipe()),
            },
        };
        let planned = setup::planned(parsed.resolve(&facts)?)?;
        let Resolved { config, steps, .. } = &planned.resolved;
        let steps = steps.ok_or_else(|| RunError::Refused("the length of the run is not known".into()))?;
        if going_on {
            check_tokenizer(&folder, config, &corpus.tokenizer)?;
        }
        if going_on && let Some(done) = finished(&folder, config, steps)? {
            return Ok(Opened::Finished { done, steps });
        }
        processor.check(planned.spec.recipe)?;
        let planned = match &began {
            Some(began) => slower::gone_on(planned, began, &processor)?,
            None => slower::settled(planned, &processor)?,
        };
        let config = planned.resolved.config;
        warn_of_no_fp8(&planned.spec);
        fit::check(&planned.spec, config.train.batch_size, &processor)?;
        let device = processor.describe();
        let (memory_total, peak_flops) = (processor.total_bytes(), processor.peak_flops());
        let checks = Checks { numerics: config.train.check_numerics, poison: false };
        let recorded = if going_on { choices::adopt(&folder, &processor) } else { Default::default() };
        let engine = processor.engine(checks).map_err(LearnError::from)?;
        let mut learner =
            Learner::new(engine, planned.spec, config.train.seed).map_err(|e| e.advising(LESS))?;
        let aside = if learner.spec().reference { Some(Aside::of(&mut learner)?) } else { None };
        if !going_on {
            // Before the folder is made: what refuses here leaves none.
            begin(&mut learner, &config)?;
        }
        let mut saved = Saved::open(&folder)?;
        if folder.is_begun() != going_on {
            return Err(RunError::Refused(format!(
                "another process began a run in {} meanwhile; start this one again, with --resume to go on with that run",
                folder.path().display()
            )));
        }
        let mut at = Position::default();
        if going_on {
            match saved.restore(&mut learner, &corpus.loader, &config)? {
                Some(position) => at = position,
                None => begin(&mut learner, &config)?,
            }
        } else {
            // Again, now that nobody else can write here.
            check_free(&folder)?;
            corpus.tokenizer.save(&folder.tokenizer())?;
            setup::keep_init(&parsed.config, &folder)?;
            if let Some(from) = &parsed.config.model.init_from {
                exchange::warn_of_what_stays(Path::new(from), &corpus.tokenizer);
            }
        }
        // A run may be asked for fewer steps than it has made.
        let steps = steps.max(at.step);
        let is_at_its_end = going_on && at.step == steps;
        // Of a run that goes on, once it has saved a step: until then its checkpoints are of the configuration that is there.
        if at.step == 0 {
            folder.write("config.toml", &config.to_toml())?;
        }
        let outputs = Outputs { jsonl: config.log.jsonl, tensorboard: config.log.tensorboard };
        let switched = began.and_then(|began| {
            let recipes = [began.recipe?, config.precision.recipe?];
            (at.step > 0 && recipes[0] != recipes[1]).then_some(recipes)
        });
        let metrics = match going_on {
            true => MetricsStart::Resumed(Lost {
                after: at.step,
                evaluation: at.evaluation.is_some(),
                samples: is_at_its_end && folder.unwritten(at.step, &config)?.samples,
                switched,
            }),
            false => MetricsStart::Fresh,
        };
        let sink = MetricsSink::open(folder.path(), outputs, metrics)?;
        let schedule = Schedule::of(&config, steps);
        let hf = exchange::Identity::new(hf, &learner.spec().model, &corpus.tokenizer)?;
        let evaluator = match &corpus.validation {
            Some(_) => {
                let (batch, mask, chunk) =
                    (learner.spec().batch, config.data.document_mask, config.train.loss_chunk);
                let evaluator = Evaluator::new(learner.weights(), batch, mask, chunk);
                Some(evaluator.map_err(|e| e.advising(LESS))?)
            }
            None => None,
        };
        if !is_at_its_end {
            choices::record(&folder, recorded, learner.weights().engine());
        }
        observer.started(&config, &describe(learner.spec()), &device, at.step, steps);
        if going_on {
            observer.event(&Event::Resumed(Resumed { step: at.step, switched }), steps);
        }
        Ok(Opened::Run(Box::new(Run {
            config,
            steps,
            folder,
            corpus,
            learner,
            schedule,
            saved,
            sink,
            at,
            hf,
            device,
            memory_total,
            peak_flops,
            evaluator,
            entropy_is_known: false,
            aside,
            prompts,
            profiler: None,
        })))
    }
}

/// The steps that the run in `folder` has made, where they are all that it is asked for and nothing of its end is left to do.
fn finished(folder: &RunFolder, config: &Config, steps: u64) -> Result<Option<u64>, RunError> {
    let at = saved::position(folder)?.filter(|at| at.step >= steps && at.evaluation.is_none());
    let Some(at) = at else { return Ok(None) };
    Ok(folder.unwritten(at.step, config)?.is_nothing().then_some(at.step))
}

/// A new run takes only a folder in which nothing is: what it writes would replace what has the same name.
fn check_free(folder: &RunFolder) -> Result<(), RunError> {
    let place = folder.path().display();
    if folder.is_begun() {
        return Err(RunError::Refused(format!(
            "{place} already holds a run; go on with --resume, choose another folder with --out FOLDER, or delete it"
        )));
    }
    match folder.foreign()? {
        None => Ok(()),
        Some(name) => Err(RunError::Refused(format!(
            "{place} is not empty (it holds {name}), and a run would mix with what is there; choose a new or an empty folder with \
             --out FOLDER"
        ))),
    }
}

/// The export at the end replaces `hf/`, which must be the run's own, and not what it began from.
fn check_export(folder: &RunFolder, init_from: Option<&str>) -> Result<(), RunError> {
    folder.check_hf()?;
    let whole = |path: &Path| path.canonicalize().ok();
    let Some(from) = init_from.and_then(|from| whole(Path::new(from))) else { return Ok(()) };
    if whole(&folder.hf()).as_ref() != Some(&from) {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "{} is what model.init_from begins with, and the export of this run would replace it; choose another folder with \
         --out FOLDER, or set checkpoint.export_hf = false",
        folder.hf().display()
    )))
}

/// A recipe of FP8 that leaves everything in bf16 is told: nothing else of the run would show it.
fn warn_of_no_fp8(spec: &TrainingSpec) {
    let products = linear_products(spec);
    warn_of_bf16_head(spec, &products);
    if !spec.recipe.is_fp8() || products.iter().flat_map(|linear| &linear.products).any(Result::is_ok) {
        return;
    }
    let why = products.iter().flat_map(|linear| &linear.products).find_map(|product| product.as_ref().err());
    tracing::warn!(
        "precision.recipe = {}, but no product of a linear layer is in FP8{}; xtrain plan says why of each",
        spec.recipe.name(),
        why.map(|why| format!(" ({why})")).unwrap_or_default()
    );
}

/// So is a head that cannot be in FP8 though the run asks for it.
fn warn_of_bf16_head(spec: &TrainingSpec, products: &[LinearProducts]) {
    let Some(head) = products.iter().find(|p| p.is_head() && spec.fp8.head && spec.recipe.is_fp8()) else {
        return;
    };
    let (m, tokens) = (&spec.model, spec.batch.sequences * spec.batch.seq_len);
    let told = |why: &Bf16Reason| match why {
        Bf16Reason::Size(size) if *size == m.vocab_size => {
            format!(
                "{why}: the vocabulary, to which model.vocab_size gives more rows where a model begins from random weights"
            )
        }
        Bf16Reason::Size(size) if *size == m.dim => format!("{why}: model.dim"),
        Bf16Reason::Size(size) if *size == tokens => format!("{why}: the tokens of a micro-batch"),
        _ => why.to_string(),
    };
    let of = LinearGemm::ALL.into_iter().zip(&head.products);
    let whys: Vec<String> = of
        .filter_map(|(gemm, product)| Some(format!("{} ({})", gemm.name(), told(product.as_ref().err()?))))
        .collect();
    if !whys.is_empty() {
        tracing::warn!("precision.head = \"fp8\", but products of the head are in bf16: {}", whys.join(", "));
    }
}

/// Fresh weights, or those of the folder that training starts from.
fn begin(learner: &mut Learner, config: &Config) -> Result<(), RunError> {
    match &config.model.init_from {
        Some(folder) => exchange::import(learner.weights(), Path::new(folder)),
        None => Ok(learner.weights().initialize(config.train.seed, config.model.init_std)?),
    }
}

/// The tokens of the prompts that are continued at the end: one that cannot be encoded is better refused now.
fn prompts(config: &Config, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, RunError> {
    let refused = |number: usize, why: &dyn std::fmt::Display| {
        RunError::Refused(format!("[eval] `prompts[{number}]` cannot be continued: {why}"))
    };
    let encoded = |(number, prompt): (usize, &String)| match tokenizer.encode_prompt(prompt) {
        Err(error @ DataError::Internal(_)) => Err(error.into()),
        Err(error) => Err(refused(number, &error)),
        Ok(tokens) if tokens.is_empty() => Err(refused(
            number,
            &"it is empty, and this tokenizer has no token that begins a text; give it some text",
        )),
        Ok(tokens) => Ok(tokens),
    };
    config.eval.prompts.iter().enumerate().map(encoded).collect()
}

/// The model in a few words.
pub(super) fn describe(spec: &TrainingSpec) -> String {
    let fp8 = match spec.recipe.is_fp8() {
        true => {
            let products = linear_products(spec);
            let share = 100.0 * fp8_share(&products);
            let has_head = products.iter().any(|p| p.is_head() && p.is_all_fp8());
            let head = if has_head { " and the head" } else { "" };
            format!(", {} ({share:.0}% of the linear layers{head})", spec.recipe.name())
        }
        false => String::new(),
    };
    format!("{}{fp8}", spec.model.title())
}
