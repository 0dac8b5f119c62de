//! Gzip files: several members in a row, with optional zero padding after the last one (from tapes and block
//! devices).

use std::io::{self, BufRead, ErrorKind, Read};

use flate2::bufread::GzDecoder;

/// Decompressed bytes of all members of a gzip file.
pub(super) struct GzipMembers<R> {
    /// `None` only while the next member takes over the file.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> GzipMembers<R> {
    pub(super) fn new(file: R) -> Self {
        GzipMembers { member: Some(GzDecoder::new(file)) }
    }
}

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(member) = &mut self.member else { return Ok(0) };
            let len = member.read(out)?;
            if len > 0 || out.is_empty() {
                return Ok(len);
            }
            // The member has ended and its checksum matches.
            if !has_another_member(member.get_mut())? {
                return Ok(0);
            }
            self.member = self.member.take().map(|member| GzDecoder::new(member.into_inner()));
        }
    }
}

/// True if another member follows. Zeros are padding; anything after them is an error.
fn has_another_member(file: &mut impl BufRead) -> io::Result<bool> {
    let mut has_zeros = false;
    loop {
        let bytes = match file.fill_buf() {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            bytes => bytes?,
        };
        let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
        match bytes.len() - zeros {
            0 if zeros == 0 => return Ok(false),
            0 => {}
            _ if has_zeros || zeros > 0 => {
                return Err(io::Error::new(ErrorKind::InvalidData, "there is data after the padding"));
            }
            _ => return Ok(true),
        }
        has_zeros = true;
        file.consume(zeros);
    }
}
