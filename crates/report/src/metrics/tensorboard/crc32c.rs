//! CRC-32C (Castagnoli), the checksum of RFC 3720, appendix B.4.

const TABLE: [u32; 256] = table();

/// The checksum of `data`.
pub(super) fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc, &byte| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            // The polynomial 0x1EDC6F41 with its bits reversed.
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn agrees_with_the_vectors_of_rfc_3720() {
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c(&ascending), 0x46DD_794E);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }
}
