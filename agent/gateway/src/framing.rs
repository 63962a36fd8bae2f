//! Where messages end in what a server sends: the only thing that is looked at while bytes are
//! moved. Without it nothing could be said to a client whose server or lease is gone, since a
//! message in the middle of another one is garbage.

use postgres_protocol::message::backend::ERROR_RESPONSE_TAG;

const HEADER: usize = 5;

#[derive(Debug, Default)]
pub(crate) struct Framing {
    /// Bytes of a header that is not complete, and how many there are.
    header: [u8; HEADER],
    have: usize,
    /// Bytes that are left of the message.
    left: usize,
    /// Of the last message.
    tag: u8,
    /// The server broke the protocol; nothing is known any more.
    lost: bool,
}

impl Framing {
    /// Takes the next bytes. Returns after how many of them the last complete message ends;
    /// `None` if none ends here.
    pub(crate) fn advance(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut position = 0;
        let mut boundary = self.is_boundary().then_some(0);
        while position < bytes.len() && !self.lost {
            let rest = &bytes[position..];
            if self.left > 0 {
                let step = self.left.min(rest.len());
                self.left -= step;
                position += step;
            } else {
                position += self.take_header(rest);
            }
            if self.is_boundary() {
                boundary = Some(position);
            }
        }
        boundary
    }

    fn take_header(&mut self, bytes: &[u8]) -> usize {
        let step = (HEADER - self.have).min(bytes.len());
        self.header[self.have..self.have + step].copy_from_slice(&bytes[..step]);
        self.have += step;
        if self.have == HEADER {
            let [tag, length @ ..] = self.header;
            self.have = 0;
            self.tag = tag;
            match (u32::from_be_bytes(length) as usize).checked_sub(4) {
                Some(left) => self.left = left,
                None => self.lost = true,
            }
        }
        step
    }

    /// All messages so far are complete.
    pub(crate) fn is_boundary(&self) -> bool {
        self.have == 0 && self.left == 0 && !self.lost
    }

    /// The last message was an error: the server has said why it ends.
    pub(crate) fn ended_with_error(&self) -> bool {
        self.tag == ERROR_RESPONSE_TAG
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: &[u8] = b"Z\0\0\0\x05I";
    const PARSED: &[u8] = b"1\0\0\0\x04";

    #[test]
    fn boundaries() {
        let mut framing = Framing::default();
        assert!(framing.is_boundary());
        assert_eq!(framing.advance(READY), Some(6));
        let two = [READY, PARSED].concat();
        assert_eq!(framing.advance(&two), Some(11));
        assert_eq!(framing.advance(&two[..8]), Some(6));
        assert!(!framing.is_boundary());
        assert_eq!(framing.advance(&two[8..10]), None);
        assert_eq!(framing.advance(&two[10..]), Some(1));
        assert!(framing.is_boundary());
        assert_eq!(framing.advance(&READY[..5]), Some(0));
        assert!(!framing.is_boundary());
    }

    #[test]
    fn every_cut_gives_the_same() {
        let stream = [READY, PARSED, b"E\0\0\0\x05\0", READY, b"D\0\0\0\x0a123456"].concat();
        for cut in 0..stream.len() {
            let mut framing = Framing::default();
            framing.advance(&stream[..cut]);
            framing.advance(&stream[cut..]);
            assert!(framing.is_boundary());
        }
        let mut bytewise = Framing::default();
        let boundaries = stream
            .chunks(1)
            .filter(|byte| bytewise.advance(byte) == Some(1))
            .count();
        assert_eq!(boundaries, 5);
    }

    #[test]
    fn garbage_is_never_a_boundary_again() {
        let mut framing = Framing::default();
        assert_eq!(framing.advance(b"Z\0\0\0\x03"), Some(0));
        assert!(!framing.is_boundary());
        assert_eq!(framing.advance(READY), None);
    }

    #[test]
    fn an_error_at_the_end() {
        let mut framing = Framing::default();
        framing.advance(b"E\0\0\0\x05\0");
        assert!(framing.ended_with_error());
        framing.advance(READY);
        assert!(!framing.ended_with_error());
    }
}
