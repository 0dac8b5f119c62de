//! Parquet: whole rows, with nested columns, as JSON.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::basic::{ConvertedType, Repetition};
use parquet::column::page::PageReader;
use parquet::errors::Result as ParquetResult;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, RowGroupReader};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Number, Value};

use super::checked_pages::CheckedPages;
use super::page_limit::LimitedPages;
use super::{damaged, open_file};
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};
use crate::input::bad_rows::{ReadError, SKIPPING};
use crate::input::files::InputFile;
use crate::input::{MAX_VALUE_BYTES, Piece, ROW_KEYS};
use xtrain_checkpoint::first_few;

/// Reads the rows of a parquet file; of their columns, those of [`ROW_KEYS`].
pub(in crate::input) struct ParquetRows {
    rows: RowIter<'static>,
    pages: Arc<LimitedPages>,
    path: PathBuf,
    file_bytes: u64,
    rows_done: u64,
    rows_total: u64,
    bytes_read: Arc<AtomicU64>,
}

impl ParquetRows {
    pub(in crate::input) fn open(input: &InputFile, bytes_read: Arc<AtomicU64>) -> Result<ParquetRows> {
        let path = &input.path;
        let (opened, metadata) = open_file(path)?;
        let schema = metadata.file_metadata().schema();
        let known: Vec<_> =
            schema.get_fields().iter().filter(|field| ROW_KEYS.contains(&field.name())).cloned().collect();
        if known.is_empty() {
            let names = schema.get_fields().iter().map(|field| format!("{:?}", field.name()));
            let problem =
                format!("there are no columns of conversations; the file has {}", first_few(names, 8));
            return Err(DataError::input(
                path,
                "schema",
                problem,
                format!("known are {}", ROW_KEYS.join(", ")),
            ));
        }
        if let Some(name) = known.iter().find_map(|field| repeated_outside_list(field, false)) {
            let problem = format!("column {name:?} is repeated without being a list");
            let advice = "write the file again, for example with pyarrow";
            return Err(DataError::input(path, "schema", problem, advice));
        }
        let projection = Type::group_type_builder(schema.name()).with_fields(known).build();
        let projection = projection.map_err(|error| damaged(path, "schema", &error.to_string()))?;
        let rows_total = u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
        let pages = Arc::new(LimitedPages::new(opened));
        let file = CheckedFile { pages: Arc::clone(&pages), metadata: Arc::new(metadata) };
        let rows = catch_panic(|| RowIter::from_file_into(Box::new(file)).project(Some(projection)))
            .map_err(|error| damaged(path, "schema", &error))?;
        Ok(ParquetRows {
            rows,
            pages,
            path: path.clone(),
            file_bytes: input.bytes,
            rows_done: 0,
            rows_total,
            bytes_read,
        })
    }

    fn next_piece(&mut self) -> std::result::Result<Option<Piece>, ReadError> {
        let read = catch_panic(|| self.rows.next().transpose());
        let location = format!("row {}", self.rows_done + 1);
        let row = match (read, self.pages.refused()) {
            (_, Some(problem)) => {
                let advice = "write fewer rows to a page (pyarrow: write_batch_size=16 in write_table)";
                return Err(DataError::input(&self.path, location, problem, advice).into());
            }
            (Err(error), None) => return Err(damaged(&self.path, &location, &error).into()),
            (Ok(Some(row)), None) => row,
            (Ok(None), None) if self.rows_done < self.rows_total => {
                let problem = "its footer counts more rows than there are".to_owned();
                return Err(damaged(&self.path, &location, &problem).into());
            }
            (Ok(None), None) => return Ok(None),
        };
        self.rows_done += 1;
        let share = self.rows_done as f64 / self.rows_total.max(1) as f64;
        self.bytes_read.store((self.file_bytes as f64 * share.min(1.0)) as u64, Ordering::Relaxed);
        let refused = |problem: String| {
            let advice = format!("write the column as strings, or {SKIPPING}");
            ReadError::Row(DataError::input(&self.path, location.as_str(), problem, advice))
        };
        let text = object(&row).map_err(refused)?.to_string();
        if text.len() > MAX_VALUE_BYTES {
            return Err(refused(format!("the row is longer than {} MiB", MAX_VALUE_BYTES >> 20)));
        }
        Ok(Some(Piece { text, begins_document: true, ends_document: true, row: self.rows_done }))
    }
}

impl Iterator for ParquetRows {
    type Item = std::result::Result<Piece, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().transpose()
    }
}

/// The name of a repeated field that no list or map holds: the parquet crate reads those wrongly
/// (arrow-rs issue 2394).
fn repeated_outside_list(field: &Type, is_in_list: bool) -> Option<String> {
    let info = field.get_basic_info();
    if !is_in_list && info.has_repetition() && info.repetition() == Repetition::REPEATED {
        return Some(field.name().to_owned());
    }
    if field.is_primitive() {
        return None;
    }
    let is_list = matches!(
        info.converted_type(),
        ConvertedType::LIST | ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE
    );
    field.get_fields().iter().find_map(|child| repeated_outside_list(child, is_list))
}

/// A row or structure as JSON, with the keys in the order of the schema.
fn object(row: &Row) -> std::result::Result<Value, String> {
    let mut map = Map::new();
    for (name, field) in row.get_column_iter() {
        map.insert(name.clone(), value(field).map_err(|problem| format!("{name}: {problem}"))?);
    }
    Ok(Value::Object(map))
}

fn value(field: &Field) -> std::result::Result<Value, String> {
    let float = |number: f64| {
        let finite = Number::from_f64(number).map(Value::Number);
        finite.ok_or_else(|| format!("{number} is no number of JSON"))
    };
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => Value::Bool(*value),
        Field::Byte(number) => (*number).into(),
        Field::Short(number) => (*number).into(),
        Field::Int(number) => (*number).into(),
        Field::Long(number) => (*number).into(),
        Field::UByte(number) => (*number).into(),
        Field::UShort(number) => (*number).into(),
        Field::UInt(number) => (*number).into(),
        Field::ULong(number) => (*number).into(),
        Field::Float16(number) => float(f64::from(*number))?,
        Field::Float(number) => float(f64::from(*number))?,
        Field::Double(number) => float(*number)?,
        Field::Str(text) => Value::String(text.clone()),
        Field::Bytes(bytes) => {
            let text = std::str::from_utf8(bytes.data()).map_err(|_| "no UTF-8".to_owned())?;
            Value::String(text.to_owned())
        }
        Field::Group(row) => object(row)?,
        Field::ListInternal(list) => {
            Value::Array(list.elements().iter().map(value).collect::<std::result::Result<_, _>>()?)
        }
        Field::MapInternal(entries) => {
            let mut map = Map::new();
            for (key, entry) in entries.entries() {
                let Value::String(key) = value(key)? else { return Err("a key is no string".to_owned()) };
                map.insert(key, value(entry)?);
            }
            Value::Object(map)
        }
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => {
            return Err("dates, times and decimals are no values of JSON".to_owned());
        }
    })
}

/// A file whose pages are limited in size and checked before they are decoded.
struct CheckedFile {
    pages: Arc<LimitedPages>,
    metadata: Arc<ParquetMetaData>,
}

impl FileReader for CheckedFile {
    fn metadata(&self) -> &ParquetMetaData {
        &self.metadata
    }

    fn num_row_groups(&self) -> usize {
        self.metadata.num_row_groups()
    }

    fn get_row_group(&self, group: usize) -> ParquetResult<Box<dyn RowGroupReader + '_>> {
        Ok(Box::new(CheckedGroup { file: self, group: self.metadata.row_group(group) }))
    }

    fn get_row_iter(&self, projection: Option<Type>) -> ParquetResult<RowIter<'_>> {
        RowIter::from_file(projection, self)
    }
}

struct CheckedGroup<'f> {
    file: &'f CheckedFile,
    group: &'f RowGroupMetaData,
}

impl RowGroupReader for CheckedGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.group
    }

    fn num_columns(&self) -> usize {
        self.group.num_columns()
    }

    fn get_column_page_reader(&self, column: usize) -> ParquetResult<Box<dyn PageReader>> {
        let column = self.group.column(column);
        let descr = column.column_descr();
        let levels =
            [descr.max_rep_level(), descr.max_def_level()].iter().filter(|&&level| level > 0).count();
        let rows = usize::try_from(self.group.num_rows()).unwrap_or_default();
        let pages = SerializedPageReader::new(Arc::clone(&self.file.pages), column, rows, None)?;
        Ok(Box::new(CheckedPages::new(pages, levels)))
    }

    fn get_column_bloom_filter(&self, _: usize) -> Option<&parquet::bloom_filter::Sbbf> {
        None
    }

    fn get_row_iter(&self, projection: Option<Type>) -> ParquetResult<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}
