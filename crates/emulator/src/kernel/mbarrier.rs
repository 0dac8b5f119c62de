//! The state of an mbarrier (PTX ISA, section 9.7.13.15).

/// The most arrivals of a phase, and the most bytes that a phase may lack.
const MAX_COUNT: i64 = (1 << 20) - 1;

/// An mbarrier. A phase ends once no arrivals and no bytes are missing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mbarrier {
    /// Phases that have ended.
    pub(crate) phase: u64,
    /// Arrivals of a phase.
    expected: u32,
    /// Arrivals that the current phase lacks.
    pending: u32,
    /// Bytes that the current phase lacks. Negative if copies have brought bytes that no thread expects yet.
    tx_count: i64,
}

impl Mbarrier {
    pub(crate) fn new(arrivals: u32) -> Result<Mbarrier, String> {
        if arrivals == 0 || i64::from(arrivals) > MAX_COUNT {
            return Err(format!("an arrival count of {arrivals}; it must be 1 to {MAX_COUNT}"));
        }
        Ok(Mbarrier { phase: 0, expected: arrivals, pending: arrivals, tx_count: 0 })
    }

    /// Counts arrivals; true if the phase ends.
    pub(crate) fn arrive(&mut self, count: u32) -> Result<bool, String> {
        self.pending = self.pending.checked_sub(count).ok_or_else(|| {
            let Mbarrier { phase, expected, pending, .. } = self;
            format!(
                "arrives {count} times where phase {phase} of an mbarrier lacks {pending} of {expected} arrivals"
            )
        })?;
        self.settle()
    }

    /// Makes the current phase wait for bytes.
    pub(crate) fn expect(&mut self, bytes: i64) -> Result<(), String> {
        self.tx_count += bytes;
        if self.tx_count.abs() > MAX_COUNT {
            return Err(format!("makes an mbarrier wait for {} bytes, more than {MAX_COUNT}", self.tx_count));
        }
        Ok(())
    }

    /// Counts bytes that a copy has brought; true if the phase ends.
    pub(crate) fn receive(&mut self, bytes: i64) -> Result<bool, String> {
        self.expect(-bytes)?;
        self.settle()
    }

    /// Ends the phase if nothing is missing.
    fn settle(&mut self) -> Result<bool, String> {
        if self.pending > 0 || self.tx_count > 0 {
            return Ok(false);
        }
        if self.tx_count < 0 {
            return Err(format!(
                "copies bring {} bytes more than phase {} of an mbarrier expects",
                -self.tx_count, self.phase
            ));
        }
        self.phase += 1;
        self.pending = self.expected;
        Ok(true)
    }

    /// Describes the current phase's missing arrivals and bytes.
    pub(crate) fn lacks(&self) -> String {
        let Mbarrier { phase, expected, pending, tx_count } = self;
        let bytes = match tx_count {
            0 => String::new(),
            1.. => format!(" and {tx_count} bytes"),
            _ => format!(" and has {} bytes that no thread expects", -tx_count),
        };
        format!("phase {phase} lacks {pending} of {expected} arrivals{bytes}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_ends_with_its_last_arrival_or_byte() {
        let mut barrier = Mbarrier::new(2).unwrap();
        // Bytes may come before a thread expects them.
        assert_eq!(barrier.receive(16), Ok(false));
        barrier.expect(48).unwrap();
        assert_eq!([barrier.arrive(1), barrier.arrive(1)], [Ok(false), Ok(false)]);
        assert_eq!(barrier.lacks(), "phase 0 lacks 0 of 2 arrivals and 32 bytes");
        assert!(barrier.arrive(1).is_err_and(|text| text.contains("lacks 0 of 2 arrivals")));
        assert_eq!(barrier.receive(32), Ok(true));
        assert_eq!(barrier.phase, 1);
        assert_eq!([barrier.arrive(1), barrier.receive(8)], [Ok(false), Ok(false)]);
        assert!(barrier.arrive(1).is_err_and(|text| text.contains("8 bytes more than phase 1")));
        assert!(Mbarrier::new(0).is_err());
    }
}
