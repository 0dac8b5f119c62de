//! CPU kernel of [`Clip`].

use super::{Clip, SKIPPED};
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for Clip {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [applied, coefficient, skip] = outputs else { unreachable!("three outputs") };
        let loss_is_finite = with_real!(inputs[1].ty.dtype, T => inputs[1].scalar::<T>().is_finite());
        with_real!(coefficient.ty.dtype, T => {
            let norm = inputs[0].scalar::<T>();
            let limit = T::from_f64(f64::from(SKIPPED));
            let is_below = |amax: T| -limit < amax && amax < limit;
            let amax_counts = inputs.get(3).is_none_or(|amax| is_below(amax.scalar::<T>()));
            let counts = loss_is_finite && norm.is_finite() && amax_counts;
            coefficient.reals::<T>()[0] = if counts { self.coefficient(norm) } else { T::ZERO };
            skip.counters()[0] = u32::from(!counts);
            applied.counters()[0] += u32::from(counts);
        });
    }
}

impl Clip {
    fn coefficient<T: Real>(&self, norm: T) -> T {
        match self.max_norm > 0.0 {
            true => (T::from_f64(self.max_norm) / (norm + T::from_f64(1e-6))).min(T::ONE),
            false => T::ONE,
        }
    }
}
