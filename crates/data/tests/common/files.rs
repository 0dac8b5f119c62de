//! Files as writers write them: compressed text, and parquet.

use std::io::Write;
use std::sync::Arc;

use parquet::basic::Encoding;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd_frame(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

pub fn parquet_file(rows: &[Option<&str>], encoding: Option<Encoding>) -> Vec<u8> {
    parquet_file_with("text", rows, encoding)
}

/// A parquet file with these rows in the column `name`.
pub fn parquet_file_with(name: &str, rows: &[Option<&str>], encoding: Option<Encoding>) -> Vec<u8> {
    let schema = parse_message_type(&format!(
        "message schema {{ required int64 id; optional binary {name} (UTF8); optional binary raw; }}"
    ));
    let mut properties = WriterProperties::builder()
        .set_compression(parquet::basic::Compression::ZSTD(Default::default()))
        .set_dictionary_enabled(encoding.is_none());
    if let Some(encoding) = encoding {
        properties = properties.set_column_encoding(name.into(), encoding);
    }
    let properties = Arc::new(properties.build());
    let mut writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema.unwrap()), properties).unwrap();
    for group in rows.chunks(100) {
        let mut row_group = writer.next_row_group().unwrap();
        let ids: Vec<i64> = (0..group.len() as i64).collect();
        let mut column = row_group.next_column().unwrap().unwrap();
        column.typed::<parquet::data_type::Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let levels: Vec<i16> = group.iter().map(|row| i16::from(row.is_some())).collect();
        let values: Vec<ByteArray> = group.iter().flatten().map(|&text| ByteArray::from(text)).collect();
        for values in [values, vec![ByteArray::from(vec![0xFF]); levels.iter().sum::<i16>() as usize]] {
            let mut column = row_group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            column.close().unwrap();
        }
        row_group.close().unwrap();
    }
    writer.into_inner().unwrap()
}
