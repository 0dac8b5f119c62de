use super::markup;
use crate::inspection::{Inspection, TensorCast, render};

fn cast(block: u32, gemm: &'static str, operand: &'static str, sqnr_db: f64) -> TensorCast {
    TensorCast {
        name: format!("blocks.{block}.mlp.down_proj:{gemm}"),
        block,
        site: "mlp.down_proj".into(),
        gemm,
        operand,
        format: "e4m3".into(),
        scaling: "tile",
        amax: 3.5,
        zeros: 0.25,
        underflow: 0.015,
        saturation: 0.0,
        not_finite: 0,
        sqnr_db,
        bf16_reason: (block == 1).then(|| "<one of the last>".into()),
    }
}

fn inspection(tensors: Vec<TensorCast>) -> Inspection {
    let (run, recipe, casts) = ("runs/<b>".into(), "bf16".into(), "fp8-block".into());
    Inspection { run, step: 1200, recipe, casts, loss: 3.25, tensors }
}

#[test]
fn a_page_of_casts_has_a_cell_for_each_and_their_names() {
    let tensors = vec![
        cast(0, "fprop", "input", 31.25),
        cast(0, "wgrad", "output gradient", 12.0),
        cast(1, "fprop", "input", f64::INFINITY),
    ];
    let html = render(&inspection(tensors.clone()));
    let page = markup::read(&html).unwrap_or_else(|problem| panic!("{problem}\n{html}"));
    for said in [
        "checkpoint of step 1,200",
        "casts of fp8-block",
        "31.2",
        "12.0",
        "exact",
        "1.5%",
        "wgrad dy",
        "Rounding alone leaves about 31.5 dB",
    ] {
        assert!(page.text.contains(said), "{said} in {}", page.text);
    }
    assert!(page.text.contains("blocks.0.mlp.down_proj:wgrad") && page.text.contains("<one of the last>"));
    let cells = |page: &markup::Document| page.tags.iter().filter(|(name, _)| name == "rect").count();
    // Signal to noise, underflow and amax; there is no saturation to show.
    assert_eq!(cells(&page), 3 * 3);
    assert!(!html.contains("Saturation</h3>") && !html.contains("http"));
    let saturated = TensorCast { saturation: 0.5, ..tensors[0].clone() };
    let page = markup::read(&render(&inspection(vec![saturated]))).unwrap();
    assert!(page.text.contains("Saturation") && page.text.contains("50%"), "{}", page.text);
}

#[test]
fn a_page_of_no_casts_and_of_numbers_that_are_none_is_sound() {
    markup::read(&render(&inspection(Vec::new()))).unwrap();
    let odd =
        TensorCast { amax: 0.0, underflow: f64::NAN, not_finite: 7, ..cast(0, "dgrad", "weight", f64::NAN) };
    markup::read(&render(&inspection(vec![odd]))).unwrap();
}
