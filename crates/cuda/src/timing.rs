//! Timing of work on a GPU, for choosing the fastest of several algorithms.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::stream::{Event, Stream};

/// Timed rounds, of which the median counts, after one warm-up round. There are fewer if runs under load
/// follow.
const ROUNDS: usize = 7;
const FEW_ROUNDS: usize = 3;

/// The shortest timed run; shorter work is repeated.
const RUN_SECONDS: f64 = 400e-6;
const MOST_REPEATS: f64 = 32.0;

/// Seconds for which a candidate runs under load before it is timed, so that clocks settle within the power
/// limit, and seconds for which it is timed.
const LOAD_SECONDS: f64 = 60e-3;

/// Shorter work is not timed under load: within a step it does not determine the clocks.
const LEAST_SECONDS_UNDER_LOAD: f64 = 200e-6;

/// Candidates slower by more than this factor in short runs are not timed under load. Below the power limit
/// and at it, two algorithms may differ by that much.
const NEARLY_AS_FAST: f64 = 1.12;

/// Candidates slower than the fastest by at most this factor count as equally fast; then the first one is
/// chosen.
const AS_FAST: f64 = 1.01;
const AS_FAST_UNDER_LOAD: f64 = 1.003;

/// Runs work once, with nothing else running. Returns the reason if the work is refused.
///
/// # Errors
/// A failure of the GPU itself, after which nothing more can run on it.
pub(crate) fn try_run(
    context: &Context,
    enqueue: impl Fn(&Stream) -> Result<(), CudaError>,
) -> Result<Option<CudaError>, CudaError> {
    let stream = Stream::new(context)?;
    let _exclusive = capture_lock::exclusive();
    let result = enqueue(&stream);
    stream.synchronize()?;
    Ok(result.err())
}

/// The index of the fastest of `candidates` and its seconds; of equally fast ones the first. `enqueue` puts
/// one on a stream. None if there are no candidates. A single candidate does not run and has no time. Nothing
/// else runs meanwhile.
pub(crate) fn fastest<C>(
    context: &Context,
    candidates: &[C],
    enqueue: impl Fn(&C, &Stream) -> Result<(), CudaError>,
) -> Result<Option<(usize, Option<f64>)>, CudaError> {
    Ok(match candidates.len() {
        0 => None,
        1 => Some((0, None)),
        _ => choose(&medians(context, candidates, ROUNDS, enqueue)?, AS_FAST),
    })
}

/// [`fastest`] for work that may run at the GPU's power limit: the candidates that are nearly as fast as the
/// fastest run one after the other, each for long enough to settle at its own clocks.
pub(crate) fn fastest_under_load<C>(
    context: &Context,
    candidates: &[C],
    enqueue: impl Fn(&C, &Stream) -> Result<(), CudaError>,
) -> Result<Option<(usize, Option<f64>)>, CudaError> {
    if candidates.len() < 2 {
        return fastest(context, candidates, enqueue);
    }
    let _exclusive = capture_lock::exclusive();
    let mut times = medians(context, candidates, FEW_ROUNDS, &enqueue)?;
    let best = times.iter().copied().fold(f64::INFINITY, f64::min);
    if best < LEAST_SECONDS_UNDER_LOAD {
        return fastest(context, candidates, enqueue);
    }
    let (stream, watch) = (Stream::new(context)?, Stopwatch::new(context)?);
    for (candidate, time) in candidates.iter().zip(&mut times) {
        if *time > best * NEARLY_AS_FAST {
            *time = f64::INFINITY;
            continue;
        }
        let repeats = (LOAD_SECONDS / *time).ceil() as usize;
        watch.seconds(&stream, repeats, |stream| enqueue(candidate, stream))?;
        *time = watch.seconds(&stream, repeats, |stream| enqueue(candidate, stream))?;
    }
    let microseconds: Vec<String> = times.iter().map(|time| format!("{:.1}", time * 1e6)).collect();
    tracing::debug!("candidates under load: {} us", microseconds.join(", "));
    Ok(choose(&times, AS_FAST_UNDER_LOAD))
}

/// The first candidate that is as fast as the fastest, and its seconds.
fn choose(seconds: &[f64], as_fast: f64) -> Option<(usize, Option<f64>)> {
    let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let chosen = seconds.iter().position(|&seconds| seconds <= best * as_fast)?;
    Some((chosen, Some(seconds[chosen])))
}

/// A stopwatch for enqueued work.
struct Stopwatch {
    start: Event,
    end: Event,
}

impl Stopwatch {
    fn new(context: &Context) -> Result<Stopwatch, CudaError> {
        Ok(Stopwatch { start: Event::timed(context)?, end: Event::timed(context)? })
    }

    /// Seconds of one run, from `repeats` consecutive runs.
    fn seconds(
        &self,
        stream: &Stream,
        repeats: usize,
        enqueue: impl Fn(&Stream) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        self.start.record(stream)?;
        for _ in 0..repeats {
            enqueue(stream)?;
        }
        self.end.record(stream)?;
        self.end.synchronize()?;
        Ok(self.start.seconds_until(&self.end)? / repeats as f64)
    }
}

/// The median seconds of each candidate in short runs.
fn medians<C>(
    context: &Context,
    candidates: &[C],
    rounds: usize,
    enqueue: impl Fn(&C, &Stream) -> Result<(), CudaError>,
) -> Result<Vec<f64>, CudaError> {
    let _exclusive = capture_lock::exclusive();
    let (stream, watch) = (Stream::new(context)?, Stopwatch::new(context)?);
    // A first run of each candidate triggers lazy loading.
    for candidate in candidates {
        enqueue(candidate, &stream)?;
    }
    let seconds = |candidate, repeats| watch.seconds(&stream, repeats, |stream| enqueue(candidate, stream));
    let estimate = seconds(&candidates[0], 1)?.max(1e-7);
    let repeats = (RUN_SECONDS / estimate).ceil().clamp(1.0, MOST_REPEATS) as usize;
    // Interleaved rounds expose all candidates equally to changes of clocks and heat.
    let mut times = vec![Vec::new(); candidates.len()];
    for round in 0..=rounds {
        for (candidate, times) in candidates.iter().zip(&mut times) {
            let sample = seconds(candidate, repeats)?;
            if round > 0 {
                times.push(sample);
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
