//! Token shard: an accepted shard can be read to its end without a panic.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_data::Shard;
use xtrain_fuzz::with_file;

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    with_file("shard-00000.tokens", bytes, |path| {
        let Ok(shard) = Shard::open(path) else { return };
        let tokens = shard.header().token_count;
        let mut out = vec![0; tokens.min(1 << 16) as usize];
        let _ = shard.read(0, &mut out);
        let _ = shard.document_ends(0..tokens, &mut Vec::new());
        let _ = shard.verify();
    });
}
