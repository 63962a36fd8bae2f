//! Where a node listens, by the log of its last start.

use super::Node;

impl Node {
    /// The HTTP API.
    pub(crate) fn tcp_address(&self) -> String {
        self.logged("tcp")
    }

    /// What is served for health.
    pub(crate) fn health_address(&self) -> String {
        self.logged("health")
    }

    pub(crate) fn gateway_address(&self) -> String {
        self.logged("gateway")
    }

    fn logged(&self, what: &str) -> String {
        let log = self.log();
        let found = log.rsplit_once(&format!("{what}=Some("));
        let (_, address) = found.expect("it should listen there");
        address.split(')').next().unwrap().to_owned()
    }
}
