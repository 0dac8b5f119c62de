//! Variants of an op's work: some ops need only a part of it for some contents of an input.
//!
//! If that input is one that the host writes, the variant follows from its staged bytes, which the GPU
//! receives before the part runs, so that no number which is passed along can contradict them. Otherwise the
//! variant that is right for any content runs.
//!
//! A part is captured for each variant that it runs.

use crate::part::Part;
use std::ops::Range;
use xtrain_cuda::CudaKernel;
use xtrain_program::{KernelTable, Program, Storage};

/// An instance whose work varies with an input that the host writes.
pub(super) struct Varying {
    instance: usize,
    /// The place of the input among the staged bytes.
    place: Range<usize>,
}

/// The instances of `program` whose work varies with an input that the host writes. `place` is where such an
/// input is staged.
pub(super) fn varying(
    program: &Program,
    kernels: &KernelTable<dyn CudaKernel>,
    place: impl Fn(&str) -> Option<Range<usize>>,
) -> Vec<Varying> {
    let of = |(instance, of): (usize, &xtrain_program::Instance)| {
        let input = kernels.find(of.code.op())?.varies_with()?;
        let Storage::Input { name } = &program.value(of.inputs[input]).storage else { return None };
        Some(Varying { instance, place: place(name)? })
    };
    program.instances.iter().enumerate().filter_map(of).collect()
}

/// The variants of the instances of a part whose work varies; of those that are missing, variant 0.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Chosen(Vec<(usize, usize)>);

impl Chosen {
    /// The variants in `part` of a program for the staged bytes of its inputs.
    pub(super) fn of_inputs(
        program: &Program,
        part: Part,
        varying: &[Varying],
        staged: &[u8],
        kernels: &KernelTable<dyn CudaKernel>,
    ) -> Chosen {
        let runs = |of: &&Varying| part.runs(&program.instances[of.instance]);
        let variant = |of: &Varying| {
            let instance = &program.instances[of.instance];
            let kernel = kernels.find(instance.code.op())?;
            Some((of.instance, kernel.variant(&program.input_types(instance), &staged[of.place.clone()])))
        };
        Chosen(varying.iter().filter(runs).filter_map(variant).collect())
    }

    /// The variant of an instance: 0 if its work does not vary.
    pub(super) fn of(&self, instance: usize) -> usize {
        self.0.iter().find(|(of, _)| *of == instance).map_or(0, |(_, variant)| *variant)
    }
}
