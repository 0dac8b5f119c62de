//! Keys under which the chosen attention algorithms are recorded.
//!
//! Keys are spelled out here, so that they do not change with the names of types and fields. `former` is the
//! spelling in the `choices.json` of older runs, which is only read.

use super::Attention;
use xtrain_cuda::ChoiceKey;
use xtrain_tensor::TensorType;

impl Attention {
    /// Key of the choice between implementations of the forward.
    pub(super) fn forward_key(&self, qkv: TensorType, documents: bool) -> ChoiceKey {
        let op = self.in_fixed_order();
        ChoiceKey {
            text: format!("attention of {qkv}, {}{}", op.sizes(), documents_text(documents)),
            former: format!("{} of {qkv}{}", op.former(), former_documents(documents)),
        }
    }

    /// Key of the choice between implementations of the backward.
    pub(super) fn backward_key(&self, qkv: TensorType, documents: bool) -> ChoiceKey {
        ChoiceKey {
            text: format!("attention_grad of {qkv}, {}{}", self.sizes(), documents_text(documents)),
            former: format!("AttentionGrad({}) of {qkv}{}", self.former(), former_documents(documents)),
        }
    }

    /// Key of the choice between tile sizes of the kernel named `kernel`.
    pub(super) fn tiles_key(&self, kernel: &str, sequences: usize, documents: bool) -> ChoiceKey {
        let op = self.in_fixed_order();
        let (sizes, former) = (op.sizes(), op.former());
        ChoiceKey {
            text: format!("tiles of {kernel}, {sequences} sequences, {sizes}{}", documents_text(documents)),
            former: format!("{kernel} of {former}, {sequences} sequences{}", former_documents(documents)),
        }
    }

    /// The op with `deterministic` set. The forward and the tiled kernels sum in a fixed order in any case,
    /// so their choice does not depend on it.
    fn in_fixed_order(&self) -> Attention {
        Attention { deterministic: true, ..*self }
    }

    fn sizes(&self) -> String {
        let Attention { seq_len, heads, kv_heads, head_dim, scale, deterministic } = self;
        let order = if *deterministic { ", deterministic" } else { "" };
        let scale = scale.map(|scale| format!(", scale {scale:?}")).unwrap_or_default();
        format!("seq_len {seq_len}, {heads} heads, {kv_heads} kv_heads, head_dim {head_dim}{scale}{order}")
    }

    fn former(&self) -> String {
        let Attention { seq_len, heads, kv_heads, head_dim, scale, deterministic } = self;
        // Older runs had no other scale.
        let scale = scale.map(|scale| format!("scale: {scale:?}, ")).unwrap_or_default();
        format!(
            "Attention {{ seq_len: {seq_len}, heads: {heads}, kv_heads: {kv_heads}, head_dim: {head_dim}, \
             {scale}deterministic: {deterministic} }}"
        )
    }
}

fn documents_text(documents: bool) -> &'static str {
    if documents { ", within documents" } else { "" }
}

fn former_documents(documents: bool) -> &'static str {
    if documents { " within documents" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_tensor::DType;

    /// The former keys are copied from the `choices.json` of a run.
    #[test]
    fn keys_are_spelled_out_and_former_keys_are_those_of_older_runs() {
        let op =
            Attention { seq_len: 48, heads: 4, kv_heads: 2, head_dim: 64, scale: None, deterministic: false };
        let qkv = TensorType::new(DType::BF16, [96, 512]);
        let forward = op.forward_key(qkv, false);
        assert_eq!(
            forward.text,
            "attention of bf16[96, 512], seq_len 48, 4 heads, 2 kv_heads, head_dim 64, deterministic"
        );
        assert_eq!(forward.former, FORWARD);
        let backward = op.backward_key(qkv, true);
        assert_eq!(
            backward.text,
            "attention_grad of bf16[96, 512], seq_len 48, 4 heads, 2 kv_heads, head_dim 64, within documents"
        );
        assert_eq!(backward.former, BACKWARD);
        let tiles = op.tiles_key("flash_keys", 2, true);
        assert_eq!(
            tiles.text,
            "tiles of flash_keys, 2 sequences, seq_len 48, 4 heads, 2 kv_heads, head_dim 64, deterministic, within documents"
        );
        assert_eq!(tiles.former, TILES);
    }

    const FORWARD: &str = "Attention { seq_len: 48, heads: 4, kv_heads: 2, head_dim: 64, deterministic: true } of bf16[96, 512]";
    const BACKWARD: &str = "AttentionGrad(Attention { seq_len: 48, heads: 4, kv_heads: 2, head_dim: 64, \
                            deterministic: false }) of bf16[96, 512] within documents";
    const TILES: &str = "flash_keys of Attention { seq_len: 48, heads: 4, kv_heads: 2, head_dim: 64, \
                         deterministic: true }, 2 sequences within documents";
}
