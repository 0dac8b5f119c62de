use super::*;
use crate::metrics::format::{bytes, count, duration, gib, grouped, percent, significant};

#[test]
fn a_step_is_one_line() {
    assert_eq!(
        line(&step(120).into(), Some(2000)),
        "step  120/2000  loss  3.4512  grad_norm  0.84  lr 9.98e-4  mem 0.42 GiB (2%)  61.2k tok/s  0.040 TFLOP/s  left 2m41s"
    );
}

#[test]
fn a_step_line_has_what_is_known_and_no_more() {
    let bare = StepMetrics { memory_total_bytes: None, seconds_left: None, ..step(7) };
    assert_eq!(
        line(&bare.into(), None),
        "step      7  loss  3.4512  grad_norm  0.84  lr 9.98e-4  mem 0.42 GiB  61.2k tok/s  0.040 TFLOP/s"
    );
    let last = StepMetrics { seconds_left: Some(0.0), ..bare };
    assert!(line(&last.into(), None).ends_with(" TFLOP/s"));
    let card = StepMetrics {
        loss: 10.98,
        grad_norm: 12.34,
        memory_bytes: 80 << 30,
        memory_total_bytes: Some(139 << 30),
        tflops: 412.6,
        mfu: Some(0.4171),
        skipped: 2,
        ..step(100_000)
    };
    assert_eq!(
        line(&card.into(), Some(100_000)),
        "step 100000/100000  loss 10.9800  grad_norm  12.3  lr 9.98e-4  mem 80.00 GiB (58%)  61.2k tok/s    413 TFLOP/s  MFU 41.7%  skipped 2  left 2m41s"
    );
}

#[test]
fn a_step_line_says_how_much_is_trained_where_not_all_is() {
    let trained = TrainedMetrics { tokens_per_second: 23_269.0, share: 0.38, padding: 0.0047 };
    let text = line(&StepMetrics { trained: Some(trained), ..step(1) }.into(), None);
    assert!(text.contains("TFLOP/s  trained 38%  padding 0.5%  left"), "{text}");
}

#[test]
fn step_lines_of_one_run_align() {
    let early = StepMetrics { loss: 10.9, grad_norm: 0.001, tokens_per_second: 950.0, ..step(1) };
    let late = StepMetrics { loss: f64::NAN, grad_norm: 123.4, tokens_per_second: 1.35e6, ..step(1999) };
    let [early, late] = [early, late].map(|m| line(&m.into(), Some(2000)));
    for word in ["loss", "grad_norm", "lr", "mem", "tok/s", "TFLOP/s", "left"] {
        assert_eq!(early.find(word), late.find(word), "{word}\n{early}\n{late}");
    }
}

#[test]
fn a_line_of_experts_that_ranks_share_has_their_largest_load() {
    let shared = ExpertMetrics { rank_load: vec![1.5, 1.0, 1.25], ..experts(4) };
    assert_eq!(
        line(&shared.into(), Some(2000)),
        "experts    4/2000  balance 2.031  z 4.12  largest load 1.32 x mean (block 3)  of a rank 1.50 x mean (block 1)  least used 41 tokens"
    );
}

#[test]
fn other_events_are_one_line_each() {
    let lines: Vec<_> = records().iter().skip(2).map(|record| line(&record.event, Some(2000))).collect();
    assert_eq!(
        lines,
        [
            "eval    2/2000  loss  2.5000  perplexity 12.2  1.8700 bits/byte  accuracy 43.0%",
            "eval    2/2000  loss 900.0000  perplexity inf",
            "skip    3/2000  loss inf  grad_norm -inf: not finite, no update  skipped 1",
            "save    3/2000  runs/ä b/step-3",
            "resumed after step 3",
            "resumed after step 3, from bf16 to fp8-block",
            "reference    8/2000  loss  2.0020  in bf16  2.0000  gap +0.100% over 4 steps",
            "reference   16/2000  loss     inf  in bf16  2.0000  gap +inf% over 4 steps",
            "sample after step 3:\n    Once \"upon\"\n     a\ttime\\u{1b}[2J\u{2028}",
            "source    3/2000  train_loss  2.7500  loss  2.9000  perplexity 18.2  accuracy 41.0%  819k tokens, 0.31 epochs  data/ä.jsonl",
            "source    3/2000  loss     inf  perplexity inf  b.txt",
            "task    3/2000  acc_norm 0.4125  95% 0.3460 to 0.4820  capitals",
            "task    4/2000  acc_norm NaN  b\\u{1b}",
            "warning    3/2000  the loss\\u{1b} is high",
            "experts    3/2000  balance 2.031  z 4.12  largest load 1.32 x mean (block 3)  least used 41 tokens",
            "experts    0/2000  balance inf  z -inf",
        ]
    );
}

#[test]
fn counts_have_three_digits_and_a_suffix() {
    for (value, text) in [
        (0.0, "0"),
        (7.0, "7"),
        (0.5, "0.50"),
        (999.0, "999"),
        (999.6, "1.00k"),
        (61_234.0, "61.2k"),
        (999_499.0, "999k"),
        (999_960.0, "1.00M"),
        (1_350_000.0, "1.35M"),
        (7.616e9, "7.62B"),
        (1.48e13, "14.8T"),
        (2e18, "2000000T"),
        (-1500.0, "-1.50k"),
        (f64::NAN, "NaN"),
        (f64::NEG_INFINITY, "-inf"),
    ] {
        assert_eq!(count(value), text);
    }
}

#[test]
fn sizes_have_binary_units() {
    for (value, text) in [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1_048_575, "1.00 MiB"),
        (450_971_566, "430 MiB"),
        (139 << 30, "139 GiB"),
        (u64::MAX, "16384 PiB"),
    ] {
        assert_eq!(bytes(value), text);
    }
    assert_eq!(gib(450_971_566), "0.42 GiB");
    assert_eq!(gib(64_400_000), "61.4 MiB");
}

#[test]
fn durations_have_two_units() {
    for (seconds, text) in [
        (0.0, "0ms"),
        (0.3124, "312ms"),
        (0.9996, "1.0s"),
        (4.24, "4.2s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (161.0, "2m41s"),
        (3599.6, "1h00m"),
        (3725.0, "1h02m"),
        (86_400.0 * 3.0 + 3600.0 * 4.0, "3d04h"),
        (86_400.0 * (2.0 * 365.0 + 41.0), "2y41d"),
        (f64::MAX, "584942417355y26d"),
        (f64::NAN, "?"),
        (f64::INFINITY, "?"),
        (-1.0, "?"),
    ] {
        assert_eq!(duration(seconds), text);
    }
}

#[test]
fn numbers_have_three_significant_digits() {
    for (value, text) in [
        (0.0, "0"),
        (0.000_000_42, "4.2e-7"),
        (0.0396, "0.040"),
        (0.84, "0.84"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (99_999.0, "99999"),
        (1e5, "1.0e5"),
        (-2.5, "-2.50"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
    ] {
        assert_eq!(significant(value), text);
    }
    assert_eq!(
        [grouped(0), grouped(999), grouped(1000), grouped(12_345_678)],
        ["0", "999", "1,000", "12,345,678"]
    );
    assert_eq!([percent(0.0204, 0), percent(0.4171, 1)], ["2%", "41.7%"]);
}
