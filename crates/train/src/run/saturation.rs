//! Warnings of casts that saturate at static scales.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use xtrain_checkpoint::first_few;
use xtrain_data::shell_path;
use xtrain_step::learner::Saturated;

/// Saturated tensors that a warning names.
const NAMED: usize = 3;

/// The tensors that have saturated in this process, and those of which it has warned. A run may saturate in
/// every step, so a warning follows only if there are twice as many, or one is twice as far beyond its scale.
#[derive(Default)]
pub(super) struct Saturation {
    tensors: BTreeSet<Arc<str>>,
    /// Number of tensors at the last warning.
    warned: usize,
    /// Largest excess at the last warning.
    excess: f64,
}

impl Saturation {
    /// The warning that is due after a step in which these tensors saturated, of a run in `folder`.
    pub(super) fn warning(&mut self, saturated: &[Saturated], folder: &Path) -> Option<String> {
        self.tensors.extend(saturated.iter().map(|of| of.tensor.clone()));
        let mut worst: Vec<&Saturated> = saturated.iter().collect();
        worst.sort_by(|a, b| b.excess.total_cmp(&a.excess));
        let excess = worst.first()?.excess;
        if self.tensors.len() < 2 * self.warned && excess < 2.0 * self.excess {
            return None;
        }
        (self.warned, self.excess) = (self.tensors.len(), self.excess.max(excess));
        let named = worst.iter().map(|of| format!("{} ({:.2}x)", of.tensor, of.excess));
        Some(format!(
            "casts saturate, because these tensors exceed the range of their static scales: {}; write new scales from a checkpoint with xtrain inspect {} \
             --write-scales FILE, and continue with --resume --set precision.static_scales=FILE",
            first_few(named, NAMED),
            shell_path(folder)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_follows_twice_as_many_tensors_or_twice_the_excess() {
        let mut saturation = Saturation::default();
        let mut warned = |tensors: &[(&str, f64)]| {
            let of = |&(tensor, excess): &(&str, f64)| Saturated { tensor: tensor.into(), excess };
            let saturated: Vec<_> = tensors.iter().map(of).collect();
            saturation.warning(&saturated, Path::new("runs/a b"))
        };
        assert_eq!(warned(&[]), None);
        let first = warned(&[("a input", 1.25)]).expect("the first");
        assert!(
            first.contains("a input (1.25x);") && first.contains("inspect 'runs/a b' --write-scales"),
            "{first}"
        );
        assert_eq!(warned(&[("a input", 2.4)]), None);
        // Two of them ever.
        assert!(warned(&[("b weight", 1.1)]).is_some());
        assert_eq!(warned(&[("c input", 1.1)]), None);
        assert!(warned(&[("a input", 2.5)]).is_some());
        let many =
            [("a input", 1.2), ("b weight", 2.0), ("c input", 1.9), ("d input", 1.1), ("e input", 1.3)];
        assert_eq!(warned(&many[..3]), None);
        let last = warned(&[&many[..], &[("f input", 1.05)]].concat()).expect("twice as many");
        assert!(last.contains("b weight (2.00x), c input (1.90x), e input (1.30x) and 3 more;"), "{last}");
    }
}
