//! A limit on the values that pages in delta encodings declare.
//!
//! The parquet crate allocates the lengths of all values of such a page at once, as many as the encoded data
//! declares: billions in a few bytes. So this file compares that number with the page's own first.

use bytes::Bytes;
use parquet::basic::Encoding;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};

/// Maximum number of values of a page in a delta encoding. Writers put some ten thousand into one.
const MAX_VALUES: u64 = 1 << 24;

/// The pages of a column, checked before they are decoded.
pub(super) struct CheckedPages<P> {
    pages: P,
    /// Lists of levels that come before the values: of repetition, and of definition.
    levels: usize,
}

impl<P: PageReader> CheckedPages<P> {
    pub(super) fn new(pages: P, levels: usize) -> CheckedPages<P> {
        CheckedPages { pages, levels }
    }
}

impl<P: PageReader> PageReader for CheckedPages<P> {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.pages.get_next_page()?;
        page.as_ref().map_or(Ok(()), |page| check(page, self.levels))?;
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.pages.skip_next_page()
    }

    fn supports_deferred_dictionary(&self) -> bool {
        self.pages.supports_deferred_dictionary()
    }

    fn take_deferred_dictionary(&mut self) -> Result<Option<Page>> {
        self.pages.take_deferred_dictionary()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.pages.at_record_boundary()
    }
}

impl<P: PageReader> Iterator for CheckedPages<P> {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

/// Fails if the encoded values of a page in a delta encoding are more than the page counts, or too many.
fn check(page: &Page, levels: usize) -> Result<()> {
    // The lengths come first: those of prefixes and of suffixes, or of whole values.
    let lists = match page.encoding() {
        Encoding::DELTA_BYTE_ARRAY => 2,
        Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
        _ => return Ok(()),
    };
    let most = u64::from(page.num_values()).min(MAX_VALUES);
    let mut rest = values(page, levels).unwrap_or_default();
    for _ in 0..lists {
        match list_of_numbers(&mut rest) {
            Some(count) if count > most => {
                let values = page.num_values();
                let problem = format!("a page of {values} values encodes more, or over {MAX_VALUES}");
                return Err(ParquetError::General(problem));
            }
            Some(_) => {}
            // It ends too early, which the parquet crate reports.
            None => break,
        }
    }
    Ok(())
}

/// The encoded values of a page, after its levels; None if it ends before.
fn values(page: &Page, levels: usize) -> Option<&[u8]> {
    let bytes: &Bytes = page.buffer();
    match page {
        Page::DataPage { num_values, def_level_encoding, rep_level_encoding, .. } => {
            // The levels of repetition come first, if there are two lists.
            let encodings = [rep_level_encoding, def_level_encoding];
            encodings[2 - levels.min(2)..].iter().try_fold(&bytes[..], |rest, encoding| {
                let skipped = match encoding {
                    Encoding::RLE => 4 + u32::from_le_bytes(*rest.first_chunk()?) as usize,
                    // One bit for each value.
                    _ => (*num_values as usize).div_ceil(8),
                };
                rest.get(skipped..)
            })
        }
        Page::DataPageV2 { def_levels_byte_len, rep_levels_byte_len, .. } => {
            bytes.get(*def_levels_byte_len as usize + *rep_levels_byte_len as usize..)
        }
        Page::DictionaryPage { .. } => Some(bytes),
    }
}

/// Takes a list of numbers in DELTA_BINARY_PACKED off `data`. Returns how many it declares; None if it ends
/// too early.
fn list_of_numbers(data: &mut &[u8]) -> Option<u64> {
    let [block, lists, count, _first] = [(); 4].map(|()| unsigned(data));
    let (block, lists, count) = (block?, lists?, count?);
    // Each block has a minimum, and lists with a number of bits for each. The first number is in the header.
    let mut left = count.saturating_sub(1);
    while left > 0 && count <= MAX_VALUES {
        unsigned(data)?;
        let widths = take(data, lists)?;
        let each = block.checked_div(lists)?;
        for &width in widths {
            if left > 0 {
                take(data, each.checked_mul(width.into())? / 8)?;
            }
            left = left.saturating_sub(each);
        }
        if block == 0 || lists == 0 {
            return None;
        }
    }
    Some(count)
}

/// Takes so many bytes off `data`.
fn take<'d>(data: &mut &'d [u8], bytes: u64) -> Option<&'d [u8]> {
    let (taken, rest) = data.split_at_checked(usize::try_from(bytes).ok()?)?;
    *data = rest;
    Some(taken)
}

/// A number of up to 64 bits, seven bits in a byte, the lowest first.
fn unsigned(data: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let [byte] = *take(data, 1)? else { return None };
        number |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(encoding: Encoding, num_values: u32, values: &[u8]) -> Page {
        Page::DataPage {
            buf: Bytes::copy_from_slice(values),
            num_values,
            encoding,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        }
    }

    /// A list of `count` numbers of 0 bits: blocks of 128 in 4 lists.
    fn list(count: u64) -> Vec<u8> {
        let mut list = vec![0x80, 1, 4];
        let mut rest = count;
        while rest >= 0x80 {
            list.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        list.extend([rest as u8, 0]);
        // A minimum and four widths for each block.
        list.extend(vec![0; 5 * (count.saturating_sub(1)).div_ceil(128).min(10) as usize]);
        list
    }

    #[test]
    fn a_page_that_encodes_more_values_than_it_has_is_refused() {
        let (lengths, both) = (Encoding::DELTA_LENGTH_BYTE_ARRAY, Encoding::DELTA_BYTE_ARRAY);
        for count in [0, 1, 2, 129, 130, 1000] {
            let two = [list(count), list(count)].concat();
            assert!(check(&page(lengths, count as u32, &list(count)), 0).is_ok(), "{count}");
            assert!(check(&page(both, count as u32, &two), 0).is_ok(), "{count}");
            let more = [list(count), list(count + 1)].concat();
            assert!(check(&page(lengths, count as u32, &list(count + 1)), 0).is_err(), "{count}");
            assert!(check(&page(both, count as u32, &more), 0).is_err(), "{count}");
        }
        assert!(check(&page(lengths, u32::MAX, &list(1 << 31)), 0).is_err());
        assert!(check(&page(both, 5, &[list(5), list(u64::MAX)].concat()), 0).is_err());
        // Levels come first.
        let levels = [&[3, 0, 0, 0, 1, 2, 3][..], &list(9)].concat();
        assert!(check(&page(lengths, 9, &levels), 1).is_ok());
        assert!(check(&page(lengths, 8, &levels), 1).is_err());
        let two_lists = [&[2, 0, 0, 0, 7, 7][..], &levels].concat();
        assert!(check(&page(lengths, 9, &two_lists), 2).is_ok());
        assert!(check(&page(lengths, 8, &two_lists), 2).is_err());
        // The parquet crate reports what ends too early.
        let whole = [list(200), list(200)].concat();
        (0..whole.len()).for_each(|end| assert!(check(&page(both, 200, &whole[..end]), 0).is_ok()));
    }
}
