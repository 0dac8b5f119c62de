//! How long work takes on a card, so that one of several implementations can be chosen.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::stream::{Event, Stream};

/// Timed rounds, of which the median counts; one more goes before them. Fewer where a run under load follows.
const ROUNDS: usize = 7;
const FEW_ROUNDS: usize = 3;

/// A timed run lasts this long at least, if need be by repeating the work.
const RUN_SECONDS: f64 = 400e-6;
const MOST_REPEATS: f64 = 32.0;

/// Under load a candidate runs this long before it is timed, so that clocks are those that its power allows, and this long while it is.
const LOAD_SECONDS: f64 = 60e-3;

/// What takes less than this is not timed under load: a step has so much beside it that clocks do not follow it.
const LONG_SECONDS: f64 = 200e-6;

/// What is slower by more than this in short runs is not tried under load: what is fast before the card is at its limit of power and what is
/// sparing there differ by that much.
const NEARLY: f64 = 1.12;

/// What is no slower than the fastest by more than this is as fast: the order of the candidates decides.
const AS_FAST: f64 = 1.01;
const AS_FAST_UNDER_LOAD: f64 = 1.003;

/// Runs something once, alone: nothing where it runs, else why it is refused.
///
/// # Errors
/// What goes wrong on the card itself, which is no refusal: nothing can be run there any more.
pub(crate) fn runs(
    context: &Context,
    put: impl Fn(&Stream) -> Result<(), CudaError>,
) -> Result<Option<CudaError>, CudaError> {
    let stream = Stream::new(context)?;
    let _exclusive = capture_lock::exclusive();
    let put = put(&stream);
    stream.synchronize()?;
    Ok(put.err())
}

/// Which of `candidates` is the fastest, the first of those that are as fast as it, and the seconds it takes; `put` puts one into a stream.
/// None where there are no candidates; one alone is not run, and has no time. Nothing else is timed meanwhile.
pub(crate) fn fastest<C>(
    context: &Context,
    candidates: &[C],
    put: impl Fn(&C, &Stream) -> Result<(), CudaError>,
) -> Result<Option<(usize, Option<f64>)>, CudaError> {
    Ok(match candidates.len() {
        0 => None,
        1 => Some((0, None)),
        _ => choose(&medians(context, candidates, ROUNDS, put)?, AS_FAST),
    })
}

/// The same where the card's power, and not its clocks, may be what bounds a step that does much of this: the few that are nearly as fast
/// as the fastest are run one after the other, each for long enough to find its own clocks.
pub(crate) fn fastest_under_load<C>(
    context: &Context,
    candidates: &[C],
    put: impl Fn(&C, &Stream) -> Result<(), CudaError>,
) -> Result<Option<(usize, Option<f64>)>, CudaError> {
    if candidates.len() < 2 {
        return fastest(context, candidates, put);
    }
    let _exclusive = capture_lock::exclusive();
    let mut times = medians(context, candidates, FEW_ROUNDS, &put)?;
    let best = times.iter().copied().fold(f64::INFINITY, f64::min);
    if best < LONG_SECONDS {
        return fastest(context, candidates, put);
    }
    let (stream, watch) = (Stream::new(context)?, Watch::new(context)?);
    for (candidate, time) in candidates.iter().zip(&mut times) {
        if *time > best * NEARLY {
            *time = f64::INFINITY;
            continue;
        }
        let repeats = (LOAD_SECONDS / *time).ceil() as usize;
        watch.seconds(&stream, repeats, |stream| put(candidate, stream))?;
        *time = watch.seconds(&stream, repeats, |stream| put(candidate, stream))?;
    }
    Ok(choose(&times, AS_FAST_UNDER_LOAD))
}

/// The first of those that are as fast as the fastest, and its seconds.
fn choose(seconds: &[f64], as_fast: f64) -> Option<(usize, Option<f64>)> {
    let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let chosen = seconds.iter().position(|&seconds| seconds <= best * as_fast)?;
    Some((chosen, Some(seconds[chosen])))
}

/// Takes the time of work.
struct Watch {
    start: Event,
    end: Event,
}

impl Watch {
    fn new(context: &Context) -> Result<Watch, CudaError> {
        Ok(Watch { start: Event::timed(context)?, end: Event::timed(context)? })
    }

    /// That of one of `repeats` runs, one after the other.
    fn seconds(
        &self,
        stream: &Stream,
        repeats: usize,
        put: impl Fn(&Stream) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        self.start.record(stream)?;
        for _ in 0..repeats {
            put(stream)?;
        }
        self.end.record(stream)?;
        self.end.synchronize()?;
        Ok(self.start.seconds_until(&self.end)? / repeats as f64)
    }
}

/// The seconds that each of some candidates takes in short runs.
fn medians<C>(
    context: &Context,
    candidates: &[C],
    rounds: usize,
    put: impl Fn(&C, &Stream) -> Result<(), CudaError>,
) -> Result<Vec<f64>, CudaError> {
    let _exclusive = capture_lock::exclusive();
    let (stream, watch) = (Stream::new(context)?, Watch::new(context)?);
    // The first run of each loads what libraries load late.
    for candidate in candidates {
        put(candidate, &stream)?;
    }
    let seconds = |candidate, repeats| watch.seconds(&stream, repeats, |stream| put(candidate, stream));
    let about = seconds(&candidates[0], 1)?.max(1e-7);
    let repeats = (RUN_SECONDS / about).ceil().clamp(1.0, MOST_REPEATS) as usize;
    // Round by round, so that what changes with time (clocks, heat) meets all alike.
    let mut times = vec![Vec::new(); candidates.len()];
    for round in 0..=rounds {
        for (candidate, times) in candidates.iter().zip(&mut times) {
            let taken = seconds(candidate, repeats)?;
            if round > 0 {
                times.push(taken);
            }
        }
    }
    Ok(times.into_iter().map(median).collect())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_is_as_fast_as_the_fastest_is_chosen() {
        assert_eq!(choose(&[1.02, 1.005, 1.0], 1.01), Some((1, Some(1.005))));
        assert_eq!(choose(&[f64::INFINITY, 2.0], 1.01), Some((1, Some(2.0))));
        assert_eq!(choose(&[], 1.01), None);
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(median(vec![5.0, 1.0, 9.0, 2.0, 3.0]), 3.0);
    }
}
