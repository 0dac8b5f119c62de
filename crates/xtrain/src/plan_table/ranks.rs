//! The lines of a plan on what ranks send to each other, and on how evenly they share the state.

use xtrain_program::{Program, StateKind};
use xtrain_report::metrics::format;
use xtrain_train::layout::{Evenness, Layout};
use xtrain_train::training_spec::TrainingSpec;

/// The lines of a step of so many micro-steps; none with one process.
pub(super) fn text(spec: &TrainingSpec, program: &Program, micro_steps: usize) -> String {
    let ranks = spec.parallel.world_size;
    if ranks == 1 {
        return String::new();
    }
    let sent = program.sent_bytes(micro_steps);
    let mut out = format!("each of {ranks} ranks sends {} a step", format::bytes(sent.values().sum()));
    for (n, (collective, bytes)) in sent.iter().enumerate() {
        let separator = if n == 0 { ": " } else { ", " };
        out.push_str(&format!("{separator}{collective} {}", format::bytes(*bytes)));
    }
    out.push('\n');
    let evenness = Layout::of(spec).ok().and_then(|layout| layout.evenness(&spec.model));
    if let Some(Evenness { fullest, emptiest }) = evenness {
        let per_element = parameter_bytes(program);
        let bytes = |elements: usize| format::bytes((elements * per_element) as u64);
        out.push_str(&format!(
            "of masters and optimizer state, the fullest rank has {} and the emptiest {}\n",
            bytes(fullest),
            bytes(emptiest)
        ));
    }
    out
}

/// Bytes of the master and the optimizer's state of an element of a parameter.
fn parameter_bytes(program: &Program) -> usize {
    let Some(parameter) = program.parameters.first() else { return 0 };
    let kinds = [StateKind::Master, StateKind::Moment1, StateKind::Moment2];
    let held = kinds.into_iter().filter_map(|kind| program.state(kind, &parameter.name));
    held.map(|state| program.ty(state).dtype.bytes(1)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_program::{Parallel, Shard};
    use xtrain_train::{programs, spec};

    /// A model whose matrices have 64 and 400 rows, and 64 elements a row.
    const RUN: &str = "[model]\nfamily = \"llama\"\ndim = 64\nlayers = 1\nheads = 4\nffn_dim = 32\nvocab_size = 400\n\
                       tie_embeddings = true\n[data]\ntrain = \"text\"\nseq_len = 32\n\
                       [train]\nsteps = 1\nbatch_size = 12\nmicro_batch_size = 1\n[precision]\nrecipe = \"fp32\"\n";

    fn of_world(world_size: usize, shard: Shard) -> (TrainingSpec, Program) {
        let parsed =
            Config::parse(Path::new("run.toml"), RUN.as_bytes(), &[] as &[&str]).expect("a run file");
        let spec = spec::plan(&parsed).expect("a plan").spec;
        let spec = TrainingSpec { parallel: Parallel { world_size, shard, ..Parallel::ALONE }, ..spec };
        let program = programs::training(&spec).expect("a program");
        (spec, program)
    }

    #[test]
    fn bytes_are_those_that_each_collective_sends() {
        let (spec, program) = of_world(2, Shard::None);
        // Half of the gradients and half of the sums, once in a step, and five words: squares, loss,
        // objective and two flags.
        let half = 4 * program.parameter_count() / 2;
        let sent = program.sent_bytes(6);
        assert_eq!(sent["all_to_all"], half as u64);
        assert_eq!(sent["all_gather"], (half + 5 * 8) as u64);
        let found = text(&spec, &program, 6);
        let [gather, exchange] = ["all_gather", "all_to_all"].map(|name| format::bytes(sent[name]));
        let expected = format!(
            "each of 2 ranks sends {} a step: all_gather {gather}, all_to_all {exchange}\n",
            format::bytes(sent["all_gather"] + sent["all_to_all"])
        );
        assert_eq!(found, expected);
    }

    #[test]
    fn the_fullest_and_the_emptiest_rank_are_those_of_the_layout() {
        let (spec, program) = of_world(3, Shard::Optimizer);
        let held: Vec<usize> = (0..3)
            .map(|rank| {
                let parallel = Parallel { rank, ..spec.parallel };
                let layout = Layout::of(&TrainingSpec { parallel, ..spec.clone() }).expect("a layout");
                let rows = |name: &str| layout.held(StateKind::Master, name).expect("a part").rows.len();
                let elements =
                    |p: &xtrain_model::ParameterSpec| rows(&p.name) * p.shape[1..].iter().product::<usize>();
                spec.model.parameters().iter().map(elements).sum()
            })
            .collect();
        assert_eq!(held.iter().sum::<usize>(), program.parameter_count());
        // Master and two moments in f32.
        let [most, fewest] =
            [held.iter().max(), held.iter().min()].map(|n| format::bytes(12 * *n.expect("ranks") as u64));
        let line = format!(
            "of masters and optimizer state, the fullest rank has {most} and the emptiest {fewest}\n"
        );
        assert!(text(&spec, &program, 4).ends_with(&line), "{}", text(&spec, &program, 4));
    }

    #[test]
    fn one_process_sends_nothing() {
        let (spec, program) = of_world(1, Shard::Optimizer);
        assert_eq!((text(&spec, &program, 12), program.sent_bytes(12).len()), (String::new(), 0));
    }
}
