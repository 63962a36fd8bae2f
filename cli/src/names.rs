//! Names that are made up here.

use branchpool_agent_api::check;
use rand::RngExt;

/// Says where the lease is from, and is not met twice.
pub(crate) fn new_id(pool: &str) -> String {
    // Also the name of an object in a cluster, which has 63 characters at most.
    let start: String = pool.chars().take(54).collect();
    format!("{}-{}", start.trim_end_matches('-'), random(8))
}

/// Letters and digits that are not mistaken for one another.
pub(crate) fn random(length: usize) -> String {
    const LETTERS: &[u8; 31] = b"abcdefghjkmnpqrstuvwxyz23456789";
    let mut random = rand::rng();
    (0..length)
        .map(|_| char::from(LETTERS[random.random_range(..LETTERS.len())]))
        .collect()
}

/// `USER@HOST`, so that `ls` says who holds what.
pub(crate) fn this_user() -> Option<String> {
    let user = std::env::var("USER").ok()?;
    let system = rustix::system::uname();
    let holder = format!("{user}@{}", system.nodename().to_string_lossy());
    check::holder(&holder).is_ok().then_some(holder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_accepted_everywhere_and_differ() {
        let pool = "x".repeat(63);
        let (one, other) = (new_id(&pool), new_id(&pool));
        assert_eq!(check::uid(&one), Ok(()));
        assert_eq!(check::dns_label(&one), Ok(()));
        assert_ne!(one, other);
        assert_eq!(check::reset_token(&random(16)), Ok(()));
    }
}
