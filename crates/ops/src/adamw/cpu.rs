//! CPU kernel of [`AdamW`]: all parameters are cut into blocks of fixed size, which run in parallel, so that
//! a few huge and many tiny tensors keep every core busy. Elements do not depend on each other, so cutting
//! changes no bit.
//!
//! Bound by memory: with f32 operands and a bf16 copy, an element reads 16 bytes and writes 14.

use super::{AdamW, AdamWParameter, CONTROLS, OPERANDS, SITES};
use crate::host::amax::tensor_amax;
use crate::host::math::vectorized;
use rayon::prelude::*;
use xtrain_tensor::formats::round_bf16_stochastic;
use xtrain_tensor::{CpuKernel, DType, Philox, Real, View, ViewMut, with_real};

/// Elements of a task: a multiple of the random words that are drawn together.
pub(super) const BLOCK: usize = 64 * 1024;

/// Elements that a task updates at once, likewise: widened bf16 operands stay in a core's first-level cache.
const PIECE: usize = 2 * 1024;

/// A block of one parameter.
struct ParameterBlock<'a> {
    master: ViewMut<'a>,
    m: ViewMut<'a>,
    v: ViewMut<'a>,
    compute: Option<ViewMut<'a>>,
    rest: Rest<'a>,
}

/// The operands of a block that are only read.
#[derive(Clone, Copy)]
struct Rest<'a> {
    grad: View<'a>,
    weight_decay: f64,
    /// The random numbers of stochastic rounding.
    rng: Philox,
    /// The index of the block's first element in the parameter.
    first: u64,
}

/// The scalars of one update.
struct Update {
    lr: f64,
    coefficient: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    /// 1 / (1 - beta1^t).
    correction1: f64,
    /// 1 / (1 - beta2^t).
    correction2: f64,
}

impl CpuKernel for AdamW {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let number = |input: &View<'_>| with_real!(input.ty.dtype, T => input.scalar::<T>().f64());
        let applied = inputs[2].counters()[0];
        let t = f64::from(applied);
        let skip = inputs[3].counters()[0] != 0;
        let update = Update {
            lr: number(&inputs[0]),
            coefficient: number(&inputs[1]),
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            correction1: 1.0 / (1.0 - self.beta1.powf(t)),
            correction2: 1.0 / (1.0 - self.beta2.powf(t)),
        };
        let casts = self.casts.iter().map(|(_, cast)| cast.outputs()).sum::<usize>();
        let (outputs, mut casts) = outputs.split_at_mut(outputs.len() - casts);
        let (outputs, amaxes) = outputs.split_at_mut(outputs.len() - self.measured.len());
        let blocks = self.blocks(inputs, outputs, applied);
        blocks.into_par_iter().for_each(|mut block| {
            block.pieces().for_each(|mut piece| {
                with_real!(piece.master.ty.dtype, T => {
                    if !skip {
                        update.apply::<T>(&mut piece);
                    }
                    piece.write_compute::<T>();
                });
            });
        });
        let masters: Vec<usize> = self.masters().collect();
        for (&p, amax) in self.measured.iter().zip(amaxes) {
            amax.fresh::<f32>()[0] = tensor_amax(outputs[masters[p]].view());
        }
        for (&(p, cast), scale) in self.casts.iter().zip(self.scales()) {
            let cast_outputs;
            (cast_outputs, casts) = casts.split_at_mut(cast.outputs());
            let scale = scale.map(|scale| inputs[scale]);
            let cast_inputs: Vec<_> = [outputs[masters[p]].view()].into_iter().chain(scale).collect();
            cast.run(&cast_inputs, cast_outputs);
        }
    }
}

impl AdamW {
    /// The blocks of all parameters in the update number `applied`.
    fn blocks<'a>(
        &self,
        inputs: &[View<'a>],
        outputs: &'a mut [ViewMut<'_>],
        applied: u32,
    ) -> Vec<ParameterBlock<'a>> {
        let mut outputs = outputs.iter_mut();
        let mut next = || outputs.next().expect("an output of each kind for every parameter");
        let mut blocks = Vec::new();
        for (p, parameter) in self.parameters.iter().enumerate() {
            let grad = inputs[CONTROLS + OPERANDS * p + 3];
            let rng = Philox::new(self.seed, applied, SITES + (self.first_parameter + p) as u32);
            let AdamWParameter { weight_decay, first_element, .. } = *parameter;
            let rest = Rest { grad, weight_decay, rng, first: first_element };
            let states = [next(), next(), next()];
            let compute = parameter.compute.map(|_| next());
            blocks.extend(cut(states, compute, rest, BLOCK));
        }
        blocks
    }
}

/// Cuts a parameter, or a block of one, into pieces of `elements`.
fn cut<'a>(
    [master, m, v]: [&'a mut ViewMut<'_>; 3],
    compute: Option<&'a mut ViewMut<'_>>,
    rest: Rest<'a>,
    elements: usize,
) -> impl Iterator<Item = ParameterBlock<'a>> {
    let mut compute = compute.map(|c| c.chunks(elements));
    let states = master.chunks(elements).zip(m.chunks(elements)).zip(v.chunks(elements));
    states.zip(rest.grad.chunks(elements)).enumerate().map(move |(n, (((master, m), v), grad))| {
        let compute = compute.as_mut().and_then(Iterator::next);
        let rest = Rest { grad, first: rest.first + (n * elements) as u64, ..rest };
        ParameterBlock { master, m, v, compute, rest }
    })
}

impl Update {
    fn apply<T: Real>(&self, block: &mut ParameterBlock<'_>) {
        let numbers = Numbers {
            beta1: T::from_f64(self.beta1),
            rest1: T::from_f64(1.0 - self.beta1),
            correction1: T::from_f64(self.correction1),
            beta2: T::from_f64(self.beta2),
            rest2: T::from_f64(1.0 - self.beta2),
            correction2: T::from_f64(self.correction2),
            lr: T::from_f64(self.lr),
            coefficient: T::from_f64(self.coefficient),
            eps: T::from_f64(self.eps),
            decay: T::from_f64(block.rest.weight_decay),
        };
        let grad = block.rest.grad.reals::<T>();
        let [rounds_m, rounds_v] = [&block.m, &block.v].map(|moment| moment.ty.dtype == DType::BF16);
        let (mut master, mut m, mut v) =
            (block.master.reals::<T>(), block.m.reals::<T>(), block.v.reals::<T>());
        vectorized(
            #[inline(always)]
            || numbers.apply(&mut master, &mut m, &mut v, &grad),
        );
        if rounds_m {
            block.rest.round(&mut m, 0);
        }
        if rounds_v {
            block.rest.round(&mut v, 16);
        }
    }
}

impl Rest<'_> {
    /// Rounds a moment to bf16 by the bits of each element's random word from `bit` on.
    fn round<T: Real>(&self, moment: &mut [T], bit: u32) {
        let round = |(x, word): (&mut T, u32)| {
            *x = T::from_f64(f64::from(round_bf16_stochastic(x.f64() as f32, word >> bit)));
        };
        // Elements before the first whole block of words.
        let before = (self.first.next_multiple_of(4) - self.first) as usize;
        let (head, blocks) = moment.split_at_mut(before.min(moment.len()));
        head.iter_mut().zip(self.first..).for_each(|(x, index)| round((x, self.rng.word(index))));
        let first = self.first.div_ceil(4);
        vectorized(
            #[inline(always)]
            || {
                for (n, x) in blocks.chunks_mut(4).enumerate() {
                    x.iter_mut().zip(self.rng.block(first + n as u64)).for_each(round);
                }
            },
        );
    }
}

/// The scalars of one update of one parameter, in the type of the computation.
#[derive(Clone, Copy)]
struct Numbers<T> {
    beta1: T,
    rest1: T,
    correction1: T,
    beta2: T,
    rest2: T,
    correction2: T,
    lr: T,
    coefficient: T,
    eps: T,
    decay: T,
}

impl<T: Real> Numbers<T> {
    /// Takes slices, so that the compiler knows that they do not overlap and vectorises the loop.
    #[inline(always)]
    fn apply(self, master: &mut [T], m: &mut [T], v: &mut [T], grad: &[T]) {
        let n = grad.len();
        let (master, m, v) = (&mut master[..n], &mut m[..n], &mut v[..n]);
        for i in 0..n {
            let g = grad[i] * self.coefficient;
            m[i] = self.beta1 * m[i] + self.rest1 * g;
            v[i] = self.beta2 * v[i] + self.rest2 * (g * g);
            let step = m[i] * self.correction1 / ((v[i] * self.correction2).sqrt() + self.eps);
            master[i] -= self.lr * (step + self.decay * master[i]);
        }
    }
}

impl ParameterBlock<'_> {
    fn pieces(&mut self) -> impl Iterator<Item = ParameterBlock<'_>> {
        let states = [&mut self.master, &mut self.m, &mut self.v];
        cut(states, self.compute.as_mut(), self.rest, PIECE)
    }

    /// Writes the compute copy from the stored master.
    fn write_compute<T: Real>(&mut self) {
        let ParameterBlock { master, compute: Some(compute), .. } = self else { return };
        // Read through a view, so that a skipped update does not even quieten a NaN.
        let ty = master.ty;
        let master = View::new(ty, master.bytes());
        compute.write::<T>(&master.reals::<T>());
    }
}
