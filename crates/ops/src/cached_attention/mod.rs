//! placeholder until the branch with it is merged
use xtrain_program::{Op, OpError, Operand, Signature};
use xtrain_tensor::{CpuKernel, TensorType, View, ViewMut};
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention { pub heads: usize, pub kv_heads: usize, pub head_dim: usize }
impl Op for CachedAttention {
    fn name(&self) -> &'static str { "cached_attention" }
    fn infer(&self, i: &[TensorType]) -> Result<Signature, OpError> {
        Ok(Signature::outputs([TensorType::new(i[0].dtype, [i[0].shape[0], self.heads * self.head_dim]), i[2], i[3]]))
    }
    fn operand(&self, n: usize) -> Operand { if n == 1 { Operand::Full } else { Operand::Compute } }
    fn in_place(&self) -> &[(usize, usize)] { &[(1, 2), (2, 3)] }
}
impl CpuKernel for CachedAttention {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (h, kv, e) = (self.heads, self.kv_heads, self.head_dim);
        let qkv = inputs[0].reals::<f32>();
        let pos = inputs[1].ints();
        let [o, k, v] = outputs else { unreachable!() };
        let b = k.ty.shape[0];
        let c = k.ty.shape[1];
        let n = pos.len() / b;
        let (mut k, mut v, mut o) = (k.reals::<f32>(), v.reals::<f32>(), o.reals::<f32>());
        let row = (h + 2 * kv) * e;
        for t in 0..pos.len() {
            let at = (t / n * c + pos[t] as usize) * kv * e;
            k[at..at + kv * e].copy_from_slice(&qkv[t * row + h * e..][..kv * e]);
            v[at..at + kv * e].copy_from_slice(&qkv[t * row + (h + kv) * e..][..kv * e]);
        }
        for t in 0..pos.len() {
            for head in 0..h {
                let g = head / (h / kv);
                let q = &qkv[t * row + head * e..][..e];
                let at = |p: usize| (t / n * c + p) * kv * e + g * e;
                let s: Vec<f32> = (0..=pos[t] as usize).map(|p| q.iter().zip(&k[at(p)..]).map(|(a, b)| a * b).sum::<f32>() / (e as f32).sqrt()).collect();
                let m = s.iter().copied().fold(f32::MIN, f32::max);
                let w: Vec<f32> = s.iter().map(|x| (x - m).exp()).collect();
                let z: f32 = w.iter().sum();
                for j in 0..e { o[t * h * e + head * e + j] = w.iter().enumerate().map(|(p, w)| w * v[at(p) + j]).sum::<f32>() / z; }
            }
        }
    }
}
