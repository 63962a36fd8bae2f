//! What the agent keeps on disk: names, directories, branches, space, and a filesystem of its
//! own where none is given.

pub mod branches;
pub mod ids;
pub mod layout;
pub mod loopfile;
pub mod scan;
pub mod space;
pub mod tool;
pub mod tree;

pub use branches::{Branches, Deletion};
pub use ids::{BranchId, EndpointId, NodeKey, PoolUid};
pub use layout::Layout;
pub use scan::Scan;
pub use space::Space;
