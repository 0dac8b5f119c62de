//! Adapters merged into the model beside which they were trained: W + (alpha / rank) B A, in f32, rounded
//! once to the type of the new folder. One tensor of the model is in memory at a time.

use crate::error::RunError;
use crate::exchange::{self, Identity, Masters};
use crate::folder::RunFolder;
use crate::open_model::{HfModel, RunModel, Which, check_base};
use crate::source::{self, CONFIG_FILE};
use crate::{adapter_folder, base_model, run_file};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::hf::{self, ExportDtype, ExportOptions, WeightReader};
use xtrain_checkpoint::{BoxError, Checkpoint};
use xtrain_data::Tokenizer;
use xtrain_model::{Adapter, Architecture, Numerics, ParameterSpec, Recipe};
use xtrain_planner::hf_names;
use xtrain_program::StateKind;

/// Adapters and the model into which they are merged, checked and not read yet.
pub struct Merge {
    /// The folder of the model.
    pub base: PathBuf,
    /// The tokenizer of the merged model: that of the run or of the folder with the adapters, or the model's;
    /// `None` if no folder has one.
    pub tokenizer: Option<Tokenizer>,
    /// Default element type: the smallest that holds the model without the adapters exactly, or bf16 if that
    /// is FP8.
    pub dtype: ExportDtype,
    /// The model with the adapters.
    model: Architecture,
    adapter: Adapter,
    numerics: Numerics,
    identity: Identity,
    weights: WeightReader,
    adapters: Adapters,
}

/// The weights of the adapters.
enum Adapters {
    /// With the shapes of the parameters.
    Run(Checkpoint, HashMap<String, Vec<usize>>),
    /// With the indices of the parameters.
    Folder(WeightReader, HashMap<String, usize>),
}

impl Merge {
    /// Opens a run with adapters, or a folder of adapters. `base` names the folder of their model; without
    /// it, that is the one that the run file names, or the description of the adapters.
    ///
    /// # Errors
    /// A run or a folder without adapters; a base that is not named, or has changed since the run; adapters
    /// of another model; damaged files.
    pub fn open(folder: &Path, which: Which, base: Option<&Path>) -> Result<Merge, RunError> {
        if !folder.exists() {
            return Err(source::no_such_folder(folder));
        }
        run_file::refuse_as_run(folder)?;
        let run = RunFolder::new(folder);
        match run.is_begun() {
            true => Merge::of_run(&run, which, base),
            false => Merge::of_folder(folder, which, base),
        }
    }

    fn of_run(run: &RunFolder, which: Which, base: Option<&Path>) -> Result<Merge, RunError> {
        let found = RunModel::read(run, which)?;
        let model = found.planned.spec.model.clone();
        let (Some(adapter), Some(named)) =
            (model.adapter.clone(), base_model::folder(&found.planned.resolved.config))
        else {
            return Err(RunError::Refused(format!(
                "{} trained the whole model and has no adapters to merge; write it with xtrain export",
                run.path().display()
            )));
        };
        let base = base.map_or(named, Path::to_owned);
        let source = source::read_hf_config(&base)?;
        exchange::checked_model(&base, &source)?;
        let weights = WeightReader::open_whole(&base, &hf_names::name_map(&model.base()))?;
        check_base(&found.checkpoint, &model, &base, "--base FOLDER")?;
        let adapters = Adapters::of_checkpoint(found.checkpoint, &model, run)?;
        let numerics = found.planned.spec.numerics();
        let balance_loss = found.planned.resolved.config.experts.balance_loss;
        let identity = Identity::new(found.source, &model.base(), &found.tokenizer, balance_loss)?;
        Ok(Merge {
            dtype: default_dtype(&base, &model, &numerics)?,
            base,
            tokenizer: Some(found.tokenizer),
            model,
            adapter,
            numerics,
            identity,
            weights,
            adapters,
        })
    }

    fn of_folder(folder: &Path, which: Which, base: Option<&Path>) -> Result<Merge, RunError> {
        let config = adapter_folder::read_config(folder)?;
        if which != Which::Latest {
            return Err(RunError::Refused(format!(
                "{} is a folder of adapters and has no checkpoints to choose from; leave out --step and --best, or name the run folder",
                folder.display()
            )));
        }
        let named = config.base.as_deref().map(Path::new).filter(|base| base.join(CONFIG_FILE).is_file());
        let Some(base) = base.or(named) else {
            let hint = config.base.map_or(String::new(), |name| format!(" (they were trained on {name:?})"));
            return Err(RunError::Refused(format!(
                "{}: name the folder of the adapters' model with --base FOLDER{hint}",
                folder.display()
            )));
        };
        let HfModel { source, model: own, adapter } = HfModel::read(base, Some(folder))?;
        let found = adapter.expect("a folder of adapters was named");
        let model = Architecture { adapter: Some(found.adapter.clone()), ..own };
        let has_tokenizer = found.has_tokenizer(base);
        let tokenizer = has_tokenizer.then(|| found.tokenizer(base, &model)).transpose()?;
        let numerics = Numerics::from(Recipe::Fp32);
        let identity = match &tokenizer {
            Some(tokenizer) => {
                let balance_loss = source.balance_loss;
                Identity::new(Some(source), &model.base(), tokenizer, balance_loss)?
            }
            None => Identity::of_folder(source),
        };
        let names = hf_names::adapter_names(&model);
        let indices = names.entries.into_iter().enumerate().map(|(index, entry)| (entry.name, index));
        Ok(Merge {
            dtype: default_dtype(base, &model, &numerics)?,
            base: base.to_owned(),
            tokenizer,
            weights: WeightReader::open_whole(base, &hf_names::name_map(&model.base()))?,
            adapters: Adapters::Folder(found.reader(&model)?, indices.collect()),
            adapter: found.adapter,
            model,
            numerics,
            identity,
        })
    }

    /// Writes the merged model as the Hugging Face folder `folder`.
    ///
    /// # Errors
    /// Those of an export; values that are not finite.
    pub fn write(&self, folder: &Path, options: &ExportOptions) -> Result<(), RunError> {
        let base = self.model.base();
        let names = hf_names::name_map(&base).entries;
        let indices: HashMap<&str, usize> =
            names.iter().enumerate().map(|(index, entry)| (entry.name.as_str(), index)).collect();
        let adapted = self.model.adapted_linears();
        let adapted: HashMap<&str, _> =
            adapted.iter().map(|linear| (linear.weight.as_str(), linear)).collect();
        let scale = self.adapter.scale();
        let merged = &mut |name: &str| -> Result<Vec<f32>, BoxError> {
            let mut values = Vec::new();
            self.weights.read(indices[name], &mut values)?;
            if let Some(linear) = adapted.get(name) {
                let [a, b] = [self.adapters.read(&linear.a)?, self.adapters.read(&linear.b)?];
                linear.parts.add_to_weights(&mut values, &a, &b, scale);
            }
            Ok(values)
        };
        let merged: &mut Masters<'_> = merged;
        let tokenizer = self.tokenizer.as_ref();
        exchange::write(&base, &self.numerics, merged, &self.identity, tokenizer, folder, options)
    }
}

impl Adapters {
    /// Refuses a checkpoint without these adapters.
    fn of_checkpoint(
        checkpoint: Checkpoint,
        model: &Architecture,
        run: &RunFolder,
    ) -> Result<Adapters, RunError> {
        let adapters = model.parameters().into_iter().filter(ParameterSpec::is_adapter);
        let shapes: HashMap<String, Vec<usize>> = adapters.map(|p| (p.name, p.shape)).collect();
        let held: HashMap<&str, &[usize]> =
            checkpoint.tensors().iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
        let is_held = |name: &str, shape: &[usize]| {
            held.get(format!("{}{name}", StateKind::Master.prefix()).as_str()).copied() == Some(shape)
        };
        if let Some((name, shape)) = shapes.iter().find(|(name, shape)| !is_held(name, shape)) {
            return Err(RunError::Refused(format!(
                "{} has no {name} of {shape:?}, which {} describes: the two are of different runs; restore the folder's own config.toml",
                checkpoint.path().display(),
                run.config().display()
            )));
        }
        Ok(Adapters::Run(checkpoint, shapes))
    }

    fn read(&self, name: &str) -> Result<Vec<f32>, BoxError> {
        match self {
            Adapters::Run(checkpoint, shapes) => exchange::read_master(checkpoint, name, &shapes[name]),
            Adapters::Folder(reader, indices) => {
                let mut values = Vec::new();
                reader.read(indices[name], &mut values)?;
                Ok(values)
            }
        }
    }
}

fn default_dtype(base: &Path, model: &Architecture, numerics: &Numerics) -> Result<ExportDtype, RunError> {
    let names = hf_names::fp8_names(&model.base(), numerics);
    Ok(match hf::lossless_dtype(base, &names)? {
        ExportDtype::Fp8 => ExportDtype::Bf16,
        other => other,
    })
}
