//! Which branches nobody was given yet, in a file of the run directory that outlives the agent.
//!
//! The journal is written behind a decision; this is written before anybody hears of it, so it must
//! cost next to nothing: a place for each slot, which holds the id of the branch that is unused.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

use crate::{
    plan::Slot,
    storage::ids::{BranchId, ID_LENGTH},
};

#[derive(Debug)]
pub(super) struct Unused {
    file: File,
}

impl Unused {
    /// Without a file every branch counts as used.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        Ok(Self { file })
    }

    /// The branch is being made.
    pub(super) fn begin(&self, slot: Slot, branch: &BranchId) -> io::Result<()> {
        self.file
            .write_all_at(branch.as_str().as_bytes(), offset(slot))
    }

    /// The branch is about to be somebody's.
    pub(super) fn end(&self, slot: Slot) -> io::Result<()> {
        self.file.write_all_at(&[0; ID_LENGTH], offset(slot))
    }

    pub(super) fn is(&self, slot: Slot, branch: &BranchId) -> bool {
        let mut found = [0; ID_LENGTH];
        let read = self.file.read_exact_at(&mut found, offset(slot));
        read.is_ok() && found == branch.as_str().as_bytes()
    }
}

fn offset(slot: Slot) -> u64 {
    u64::from(slot.0) * ID_LENGTH as u64
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::StdRng};

    use super::*;
    use crate::storage::ids::NodeKey;

    #[test]
    fn a_branch_is_unused_from_its_making_to_its_hand_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("unused");
        let mut rng = StdRng::seed_from_u64(1);
        let key = NodeKey::from_bytes([1; 32]);
        let [first, second] = [(); 2].map(|()| BranchId::generate(&key, &mut rng));
        let unused = Unused::open(&path).unwrap();
        assert!(!unused.is(Slot(7), &first), "of an empty file");
        unused.begin(Slot(7), &first).unwrap();
        unused.begin(Slot(3), &second).unwrap();
        let unused = Unused::open(&path).unwrap();
        assert!(unused.is(Slot(7), &first) && unused.is(Slot(3), &second));
        assert!(!unused.is(Slot(7), &second), "another's place");
        assert!(
            !unused.is(Slot(5), &first),
            "a place that was never written"
        );
        unused.end(Slot(7)).unwrap();
        assert!(!unused.is(Slot(7), &first) && unused.is(Slot(3), &second));
        unused.begin(Slot(7), &second).unwrap();
        assert!(!unused.is(Slot(7), &first), "the slot's next branch");
    }
}
