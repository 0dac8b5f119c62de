//! Safetensors file: all tensors of an accepted header can be read without a panic.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_checkpoint::tensor_file::{Header, TensorFile};
use xtrain_fuzz::with_file;

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    with_file("model.safetensors", bytes, |path| {
        let parsed = Header::parse(path, bytes, bytes.len());
        let opened = TensorFile::open(path);
        assert_eq!(parsed.is_ok(), opened.is_ok());
        let Ok(file) = opened else { return };
        for tensor in &file.header().tensors {
            let mut values = vec![0.0; tensor.shape.iter().product()];
            let _ = file.read_f32(tensor, &mut values);
        }
    });
}
