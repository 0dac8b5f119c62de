//! Compute capabilities.

use std::fmt;

/// A compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// 9 of 9.0.
    pub major: u32,
    /// 0 of 9.0.
    pub minor: u32,
}

impl Arch {
    /// Ampere data centre: bf16 tensor cores.
    pub const SM80: Arch = Arch::new(8, 0);
    /// Ada: FP8 tensor cores.
    pub const SM89: Arch = Arch::new(8, 9);
    /// Hopper.
    pub const SM90: Arch = Arch::new(9, 0);
    /// Blackwell data centre.
    pub const SM100: Arch = Arch::new(10, 0);
    /// Blackwell.
    pub const SM120: Arch = Arch::new(12, 0);

    /// The architectures that kernels are written for.
    pub const ALL: [Arch; 5] = [Arch::SM80, Arch::SM89, Arch::SM90, Arch::SM100, Arch::SM120];

    /// A compute capability.
    pub const fn new(major: u32, minor: u32) -> Arch {
        Arch { major, minor }
    }

    /// The compiler's target. From Hopper on it has the suffix `a`: code compiled for exactly one
    /// architecture may use its specific instructions.
    pub fn target(self) -> String {
        let suffix = if self.major >= 9 { "a" } else { "" };
        format!("sm_{}{}{suffix}", self.major, self.minor)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.target())
    }
}
