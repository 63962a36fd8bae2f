//! The names in certificates. `branchpool` is no domain of the DNS: nobody else can be asked for it.

use snafu::{Snafu, ensure};

/// Of the operator when it calls an agent.
pub const OPERATOR_NAME: &str = "operator.branchpool";
const AGENTS: &str = "agent.branchpool";

const LONGEST_NAME: usize = 253;
const LONGEST_LABEL: usize = 63;

#[derive(Debug, Snafu)]
#[snafu(display(
    "no certificate can be made for node {node:?}: together with .{AGENTS} its name must be a DNS name of at most {LONGEST_NAME} characters"
))]
pub struct InvalidNode {
    node: String,
}

/// Of the agent on a node.
pub fn agent_name(node: &str) -> Result<String, InvalidNode> {
    let name = format!("{node}.{AGENTS}");
    let fits = name.len() <= LONGEST_NAME && node.split('.').all(is_label);
    ensure!(fits, InvalidNodeSnafu { node });
    Ok(name)
}

fn is_label(label: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=LONGEST_LABEL).contains(&label.len())
        && label.bytes().all(|byte| inner(byte) || byte == b'-')
        && label.bytes().next().is_some_and(inner)
        && label.bytes().last().is_some_and(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_called_by_its_own_name_alone() {
        assert_eq!(agent_name("node-1").unwrap(), "node-1.agent.branchpool");
        assert_eq!(
            agent_name("ip-10-0-0-1.eu.internal").unwrap(),
            "ip-10-0-0-1.eu.internal.agent.branchpool"
        );
        let long = ["a"; 119].join(".");
        for bad in [
            "",
            ".",
            "*",
            "*.a",
            "a..b",
            "A",
            "a b",
            "-a",
            "a-",
            "a_b",
            "a.",
            "ä",
            &long,
            &"a".repeat(64),
        ] {
            assert!(agent_name(bad).is_err(), "{bad}");
        }
    }
}
