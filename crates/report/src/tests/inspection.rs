use super::markup;
use crate::fragments::assert_says;
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
        "32 dB or more",
        "dy is the gradient of y",
    ] {
        assert!(page.text.contains(said), "{said} in {}", page.text);
    }
    assert_says("inspection, a cast", &page.text);
    assert_says("inspection, a cast of a layer in bf16", &page.text);
    assert!(page.text.contains("<one of the last>"));
    let cells = |page: &markup::Document| page.tags.iter().filter(|(name, _)| name == "rect").count();
    // Signal to noise, underflow and amax; there is no saturation to show.
    assert_eq!(cells(&page), 3 * 3);
    assert!(!html.contains("Saturation</h3>") && !html.contains("http"));
    let saturated = TensorCast { saturation: 0.5, ..tensors[0].clone() };
    let page = markup::read(&render(&inspection(vec![saturated]))).unwrap();
    assert!(page.text.contains("Saturation") && page.text.contains("50%"), "{}", page.text);
}

#[test]
fn names_of_groups_do_not_overlap_however_few_columns_they_have() {
    let sites = ["attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"];
    let tensors = sites.map(|site| TensorCast { site: site.into(), ..cast(0, "fprop", "input", 31.0) });
    let html = render(&inspection(tensors.into()));
    let names = html.split("class=\"group\" x=\"").skip(1).map(|rest| {
        let (x, rest) = rest.split_once('"').unwrap();
        let name = rest.split('>').nth(1).unwrap().split('<').next().unwrap();
        (x.parse::<f64>().unwrap(), name.len() as f64)
    });
    let names: Vec<(f64, f64)> = names.collect();
    assert_eq!(names.len() % 3, 0);
    // A bold character of 10.5 pixels is about 6.6 wide.
    let pairs = names.chunks(3).flat_map(|map| map.windows(2));
    assert!(pairs.into_iter().all(|pair| pair[0].0 + 6.6 * pair[0].1 < pair[1].0), "{names:?}");
}

#[test]
fn a_share_in_a_cell_is_a_percentage() {
    let of = |underflow| TensorCast { underflow, ..cast(0, "fprop", "input", 31.0) };
    for (share, shown) in [(0.25, ">25%<"), (0.015, ">1.5%<"), (0.0004, ">0.04%<"), (3e-6, ">&lt;.01%<")] {
        assert!(render(&inspection(vec![of(share)])).contains(shown), "{shown}");
    }
}

#[test]
fn a_page_of_no_casts_and_of_numbers_that_are_none_is_sound() {
    let none = markup::read(&render(&inspection(Vec::new()))).unwrap();
    assert_says("inspection, no casts", none.text);
    let odd =
        TensorCast { amax: 0.0, underflow: f64::NAN, not_finite: 7, ..cast(0, "dgrad", "weight", f64::NAN) };
    markup::read(&render(&inspection(vec![odd]))).unwrap();
}
