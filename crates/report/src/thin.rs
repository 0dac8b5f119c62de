//! Smoothing of curves, and thinning that keeps their extremes.

/// A point of a curve.
pub(super) type Point = (f64, f64);

/// Minimum number of points of a curve that is smoothed.
pub(super) const SMOOTHED_FROM: usize = 40;
/// Maximum number of blocks into which [`smooth`] divides a curve.
const BLOCKS: usize = 4000;

/// A curve through `points` without their noise, and the number of points behind each of its values.
///
/// It is a running median, which a single spike does not bend, followed by a short running mean. The window
/// is a fiftieth of the curve. Towards the start it shrinks on both sides alike, so that the curve does not
/// lag behind a steep fall; towards the end it only loses its later half. Long curves are first cut into
/// blocks, each with its own median. Values that are not finite are ignored; where there is nothing else, the
/// result is NaN.
pub(super) fn smooth(points: &[Point]) -> (Vec<Point>, usize) {
    let block = (points.len() / BLOCKS).max(1);
    let blocks: Vec<Point> =
        points.chunks(block).map(|chunk| (chunk[chunk.len() / 2].0, median(chunk))).collect();
    let half = (blocks.len() / 100).max(2);
    let medians = windows(&blocks, half, median);
    (windows(&medians, half / 2, mean), (2 * half + 1) * block)
}

fn windows(points: &[Point], half: usize, reduce: fn(&[Point]) -> f64) -> Vec<Point> {
    let window = |at: usize| &points[at - half.min(at)..(at + half.min(at) + 1).min(points.len())];
    points.iter().enumerate().map(|(at, &(x, _))| (x, reduce(window(at)))).collect()
}

fn median(points: &[Point]) -> f64 {
    let mut values: Vec<f64> = points.iter().map(|point| point.1).filter(|value| value.is_finite()).collect();
    let middle = values.len() / 2;
    if values.is_empty() { f64::NAN } else { *values.select_nth_unstable_by(middle, f64::total_cmp).1 }
}

fn mean(points: &[Point]) -> f64 {
    let finite = || points.iter().map(|point| point.1).filter(|value| value.is_finite());
    finite().sum::<f64>() / finite().count() as f64
}

/// `points` as unbroken pieces, with at most four points in each of `columns` equal parts of their x range:
/// the first, the lowest, the highest and the last. A drawing that is `columns` pixels wide looks the same.
///
/// A value that is not finite ends a piece, unless finite ones of its own column surround it. The x must not
/// fall.
pub(super) fn thin(points: &[Point], columns: usize) -> Vec<Vec<Point>> {
    let (Some(&(x_first, _)), Some(&(x_last, _))) = (points.first(), points.last()) else {
        return Vec::new();
    };
    let few = points.len() <= 2 * columns;
    let width = (x_last - x_first) / columns as f64;
    let column_of = |x: f64| if width > 0.0 { ((x - x_first) / width) as usize } else { 0 };
    let mut pieces: Vec<Vec<Point>> = Vec::new();
    let mut column: Option<ThinColumn> = None;
    let mut broken = true;
    for (at, &point) in points.iter().enumerate() {
        if !point.1.is_finite() {
            broken = true;
            continue;
        }
        let index = if few { at } else { column_of(point.0) };
        match &mut column {
            Some(open) if open.index == index => open.add(point),
            _ => {
                flush(column.take(), &mut pieces);
                column = Some(ThinColumn::new(index, point, broken));
            }
        }
        broken = false;
    }
    flush(column, &mut pieces);
    pieces
}

struct ThinColumn {
    index: usize,
    starts_piece: bool,
    first: Point,
    lowest: Point,
    highest: Point,
    last: Point,
}

impl ThinColumn {
    fn new(index: usize, point: Point, starts_piece: bool) -> Self {
        Self { index, starts_piece, first: point, lowest: point, highest: point, last: point }
    }

    fn add(&mut self, point: Point) {
        if point.1 < self.lowest.1 {
            self.lowest = point;
        }
        if point.1 > self.highest.1 {
            self.highest = point;
        }
        self.last = point;
    }
}

fn flush(column: Option<ThinColumn>, pieces: &mut Vec<Vec<Point>>) {
    let Some(column) = column else { return };
    if column.starts_piece || pieces.is_empty() {
        pieces.push(Vec::new());
    }
    let piece = pieces.last_mut().expect("a piece was pushed if there was none");
    let mut corners = [column.first, column.lowest, column.highest, column.last];
    corners.sort_by(|a, b| a.0.total_cmp(&b.0));
    for corner in corners {
        if piece.last() != Some(&corner) {
            piece.push(corner);
        }
    }
}
