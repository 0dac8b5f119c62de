//! The initial values of a parameter.

/// The initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All ones: norms.
    Ones,
    /// All zeros: biases.
    Zeros,
    /// Normal numbers; the standard deviation as a multiple of the run's `init_std`.
    Normal(f32),
    /// Numbers that are uniform between minus this one and this one.
    Uniform(f32),
}
