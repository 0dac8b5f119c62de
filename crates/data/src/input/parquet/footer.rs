//! Checks of a parquet footer before the parquet crate decodes it.
//!
//! A few bytes may keep that crate busy for hours, or make it end the program: it skips lists of booleans by
//! the billion, it follows the nesting of the schema by recursion, and it copies the names of nested groups
//! for each column in them. It takes the types of known fields for granted, so a footer in which one has
//! another type is refused: both then read the same.

use std::fs::File;
use std::io::{self, BufReader};

use bytes::Bytes;
use parquet::errors::Result;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::reader::{ChunkReader, Length};

use super::thrift::{self, BINARY, BYTE, DOUBLE, I16, I64, LIST, STOP, STRUCT, invalid};

/// Maximum nesting of groups in a schema.
const MAX_GROUPS: usize = 100;
/// Maximum memory of the names of all columns, each with those of the groups that hold it.
const MAX_NAMES_BYTES: u64 = 256 << 20;

/// Reads the footer of a file.
pub(super) fn read_footer(file: &File) -> Result<ParquetMetaData> {
    ParquetMetaDataReader::new().parse_and_finish(&CheckedFooter(file))
}

/// A file of which only the footer is read.
struct CheckedFooter<'f>(&'f File);

impl Length for CheckedFooter<'_> {
    fn len(&self) -> u64 {
        Length::len(self.0)
    }
}

impl ChunkReader for CheckedFooter<'_> {
    type T = BufReader<File>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        self.0.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let footer = self.0.get_bytes(start, length)?;
        check(&footer)?;
        Ok(footer)
    }
}

/// Fails if a footer could not be decoded in time and memory that grow with its size.
fn check(footer: &[u8]) -> io::Result<()> {
    let mut schema = Schema { most: footer.len() as u64, ..Schema::default() };
    let (mut children, mut name_bytes) = (0, 0);
    thrift::read_fields(&mut &*footer, &mut |path, kind, number| {
        if !has_its_type(path, kind) {
            return Err(invalid(format!("its field {path:?} is of type {kind}")));
        }
        let number = u64::try_from(number).unwrap_or(0);
        match path {
            [2, 4] => name_bytes = number,
            [2, 5] => children = number,
            [2, 0] => schema.add(std::mem::take(&mut name_bytes), std::mem::take(&mut children))?,
            _ => {}
        }
        Ok(())
    })
}

/// The schema up to an element. Groups come before what they hold.
#[derive(Default)]
struct Schema {
    /// The open groups: elements that each still expects, and the memory of its name and those around it.
    groups: Vec<(u64, u64)>,
    /// Elements in all groups, and the most that there can be.
    children: u64,
    most: u64,
    /// Memory of the names of all columns.
    names_bytes: u64,
}

impl Schema {
    fn add(&mut self, name_bytes: u64, children: u64) -> io::Result<()> {
        while self.groups.pop_if(|(expected, _)| *expected == 0).is_some() {}
        let mut path_bytes = name_bytes.saturating_add(size_of::<String>() as u64);
        if let Some((expected, around)) = self.groups.last_mut() {
            *expected -= 1;
            path_bytes = path_bytes.saturating_add(*around);
        }
        self.children = self.children.saturating_add(children);
        if self.children > self.most {
            return Err(invalid("its schema announces more columns than fit in the footer"));
        }
        if children > 0 {
            self.groups.push((children, path_bytes));
        } else {
            self.names_bytes = self.names_bytes.saturating_add(path_bytes);
        }
        if self.groups.len() > MAX_GROUPS {
            return Err(invalid(format!("its schema nests over {MAX_GROUPS} groups")));
        }
        if self.names_bytes > MAX_NAMES_BYTES {
            let most = MAX_NAMES_BYTES >> 20;
            return Err(invalid(format!("the names of its columns take over {most} MiB")));
        }
        Ok(())
    }
}

/// False if the format gives the field of a footer, named by ids as in [`thrift::OnField`], another type. The
/// parquet crate checks booleans and the types in lists.
fn has_its_type(path: &[i64], kind: u8) -> bool {
    let is_number = matches!(kind, I16..=I64);
    match path {
        [.., 0] => kind == STOP,
        // The file.
        [1 | 3] => is_number,
        [2 | 4 | 5 | 7] => kind == LIST,
        [6] | [5, 1..=2] => kind == BINARY,
        [7, _] => kind == STRUCT,
        // An element of the schema, and its logical type.
        [2, 1..=3 | 5..=9] => is_number,
        [2, 4] => kind == BINARY,
        [2, 10] | [2, 10, _] => kind == STRUCT,
        [2, 10, 5, 1..=2] | [2, 10, 18, 2] => is_number,
        [2, 10, 7..=8, 2] | [2, 10, 7..=8, 2, _] => kind == STRUCT,
        [2, 10, 10 | 16, 1] => kind == BYTE,
        [2, 10, 17..=18, 1] => kind == BINARY,
        // A row group, its order, a column in it.
        [4, 1 | 4] => kind == LIST,
        [4, 2..=3 | 5 | 7] | [4, 4, 1] => is_number,
        [4, 1, 1] => kind == BINARY,
        [4, 1, 2 | 4..=7] => is_number,
        [4, 1, 3] => kind == STRUCT,
        // The column's description, and its statistics.
        [4, 1, 3, 1 | 4..=7 | 9..=11 | 14..=15] => is_number,
        [4, 1, 3, 2 | 13] => kind == LIST,
        [4, 1, 3, 12 | 16..=17] => kind == STRUCT,
        [4, 1, 3, 12, 1..=2 | 5..=6] => kind == BINARY,
        [4, 1, 3, 12, 3..=4 | 9] | [4, 1, 3, 13, 1..=3] | [4, 1, 3, 16, 1] => is_number,
        [4, 1, 3, 16, 2..=3] | [4, 1, 3, 17, 2] => kind == LIST,
        [4, 1, 3, 17, 1] => kind == STRUCT,
        [4, 1, 3, 17, 1, 1..=8] => kind == DOUBLE,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(result: io::Result<()>) -> String {
        result.expect_err("refused").to_string()
    }

    #[test]
    fn a_field_of_another_type_than_the_formats_is_refused() {
        // The version and, in a list, an element of the schema with a name and a decimal's scale.
        let footer = [0x15, 2, 0x19, 0x1C, 0x48, 1, b'a', 0x6C, 0x5C, 0x15, 4, 0, 0, 0, 0x16, 0, 0];
        check(&footer).expect("types as in the format");
        for end in 0..footer.len() {
            assert!(check(&footer[..end]).is_err(), "{end}");
        }
        for (at, byte, field) in [(0, 0x13, "[1]"), (4, 0x45, "[2, 4]"), (9, 0x13, "[2, 10, 5, 1]")] {
            let mut changed = footer;
            changed[at] = byte;
            // A number of two bytes in place of a text of one.
            changed[5] |= u8::from(at == 4) << 7;
            assert!(problem(check(&changed)).contains(&format!("its field {field} is of type")), "{at}");
        }
        assert!(problem(check(&[0x1B, 0, 0])).contains("a value of type 11"), "a map");
        assert!(
            problem(check(&[[0xF9, 0x19].repeat(20), vec![0; 20]].concat()))
                .contains("values nest over 16 levels")
        );
    }

    #[test]
    fn schemas_are_limited_in_nesting_and_in_the_names_of_columns() {
        let schema = || Schema { most: 1 << 40, ..Schema::default() };
        let mut deep = schema();
        (0..MAX_GROUPS).for_each(|_| deep.add(1, 1).unwrap());
        deep.add(1, 0).unwrap();
        let mut deeper = schema();
        (0..MAX_GROUPS).for_each(|_| deeper.add(1, 1).unwrap());
        assert!(problem(deeper.add(1, 1)).contains("its schema nests over 100 groups"));
        // Groups side by side.
        let mut wide = schema();
        wide.add(1, 1 << 20).unwrap();
        for _ in 0..1 << 16 {
            wide.add(1, 1).unwrap();
            wide.add(1, 0).unwrap();
        }
        // A long name around many columns.
        let mut long = schema();
        long.add(1 << 20, 1000).unwrap();
        (0..255).for_each(|_| long.add(1, 0).unwrap());
        assert!(problem(long.add(1, 0)).contains("the names of its columns take over 256 MiB"));
        let mut empty = Schema { most: 100, ..Schema::default() };
        assert!(problem(empty.add(1, 101)).contains("more columns than fit"));
    }
}
