//! Marks of a chart that are not curves: horizontal lines with labels, and vertical lines where something
//! happened.

/// Vertical lines, and what happened there.
#[derive(Clone)]
pub(super) struct Mark {
    pub(super) name: &'static str,
    /// Class of the lines and of their key in the legend.
    pub(super) class: &'static str,
    /// Places on the x axis.
    pub(super) at: Vec<f64>,
}

/// Height of a label, as a share of the height of the lowest chart that has labels.
pub(super) const LABEL_HEIGHT: f64 = 0.07;

/// Labels of horizontal lines, with the place of their lower edge; places are from 0 to 1.
///
/// A label stands on its line. Labels that would overlap move apart, up and down alike, in the order of their
/// lines. A line outside of the axis has no label.
pub(super) fn labels(lines: impl IntoIterator<Item = (f64, String)>) -> Vec<(f64, String)> {
    let mut lines: Vec<_> = lines.into_iter().filter(|(place, _)| (0.0..=1.0).contains(place)).collect();
    lines.sort_by(|a, b| a.0.total_cmp(&b.0));
    let wanted: Vec<f64> = lines.iter().map(|(place, _)| *place).collect();
    let (mut up, mut down) = (wanted.clone(), wanted);
    for n in 1..up.len() {
        up[n] = up[n].max(up[n - 1] + LABEL_HEIGHT);
    }
    for n in (1..down.len()).rev() {
        down[n - 1] = down[n - 1].min(down[n] - LABEL_HEIGHT);
    }
    let count = lines.len();
    for (n, (place, _)) in lines.iter_mut().enumerate() {
        // In both lists neighbours keep their distance, so in their mean, and within the chart, they do too.
        let (lowest, highest) = (n as f64 * LABEL_HEIGHT, 1.0 - (count - n) as f64 * LABEL_HEIGHT);
        *place = ((up[n] + down[n]) / 2.0).max(lowest).min(highest);
    }
    lines
}
