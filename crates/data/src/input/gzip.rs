//! Gzip files: members one behind the other, and zeros behind the last one, as tapes and block devices leave them.

use std::io::{self, BufRead, ErrorKind, Read};

use flate2::bufread::GzDecoder;

/// The bytes of all members of a gzip file.
pub(super) struct GzipMembers<R> {
    /// Nothing only while the next one takes the file over.
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
            // This member has been read and its checksum is right.
            if !has_another_member(member.get_mut())? {
                return Ok(0);
            }
            self.member = self.member.take().map(|member| GzDecoder::new(member.into_inner()));
        }
    }
}

/// Whether there is more than zeros behind a member.
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
                return Err(io::Error::new(ErrorKind::InvalidData, "there is something behind padding"));
            }
            _ => return Ok(true),
        }
        has_zeros = true;
        file.consume(zeros);
    }
}
