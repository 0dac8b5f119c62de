//! The example `minimal` learns.

#[allow(dead_code, unreachable_pub, reason = "its main function is not called here")]
#[path = "../examples/minimal.rs"]
mod minimal;

#[test]
fn the_smallest_program_that_trains_learns_and_continues_a_text() {
    let text = include_bytes!("../../../ARCHITECTURE.md");
    let mut learner = minimal::new_learner().expect("a model");
    let losses: Vec<f64> =
        (0..20).map(|step| minimal::train_step(&mut learner, text, step).expect("a step")).collect();
    assert!(losses[0] - losses[19] > 0.5, "{losses:?}");
    let text = minimal::generate(&mut learner, b"The ", 30).expect("a continuation");
    assert!(text.len() == 34 && text.starts_with(b"The "), "{text:?}");
}
