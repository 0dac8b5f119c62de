//! Adapters that become part of the weights beside which they were trained.

use super::LoraParts;
use rayon::prelude::*;

impl LoraParts {
    /// Adds `scale` b a of each adapter to its rows of the layer's weights. Sums over the rank are in f32.
    ///
    /// o: outputs of the layer; i: its inputs; n: [`LoraParts::width`]; m: [`LoraParts::rows`]; r: the rank.
    pub fn add_to_weights(&self, w_oi: &mut [f32], a_ni: &[f32], b_mr: &[f32], scale: f32) {
        let inputs = a_ni.len() / self.width().max(1);
        for (first, rows, first_b) in self.places() {
            let a_ri = &a_ni[first * inputs..(first + self.rank) * inputs];
            let w = &mut w_oi[rows.start * inputs..rows.end * inputs];
            let b = &b_mr[first_b * self.rank..(first_b + rows.len()) * self.rank];
            let rows = w.par_chunks_mut(inputs.max(1)).zip(b.par_chunks(self.rank));
            rows.for_each_init(
                || vec![0.0_f32; inputs],
                |sum, (w, b)| {
                    sum.fill(0.0);
                    for (a, b) in a_ri.chunks_exact(inputs.max(1)).zip(b) {
                        sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
                    }
                    w.iter_mut().zip(&*sum).for_each(|(w, sum)| *w += scale * sum);
                },
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_adapter_adds_its_product_to_its_own_rows() {
        // Two adapters of rank 2, for rows 0 and 2 to 3 of a layer of 4 outputs and 3 inputs.
        let parts = LoraParts { rank: 2, columns: vec![0..1, 2..4] };
        let (mut w, a): (Vec<f32>, Vec<f32>) =
            ((0..12).map(|n| n as f32).collect(), (0..12).map(|n| n as f32).collect());
        let b = [1.0, 0.0, 0.0, 2.0, -1.0, 1.0];
        let before = w.clone();
        parts.add_to_weights(&mut w, &a, &b, 0.5);
        let added: Vec<f32> = w.iter().zip(&before).map(|(w, before)| w - before).collect();
        // 0.5 times: row 0 of the first a; none; twice row 1 of the second a; their difference.
        assert_eq!(added, [0.0, 0.5, 1.0, 0.0, 0.0, 0.0, 9.0, 10.0, 11.0, 1.5, 1.5, 1.5]);
    }
}
