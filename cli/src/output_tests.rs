use branchpool_agent_api::{GoldenStatus, LeasePhase, PoolName};

use super::*;

pub(crate) fn lease(id: &str) -> Lease {
    Lease {
        uid: id.to_owned(),
        pool: PoolName::new("default", "shop"),
        pool_uid: "p1".to_owned(),
        phase: LeasePhase::Bound,
        reason: None,
        message: None,
        branch: "abcdefghijklm".to_owned(),
        endpoint: "abc".to_owned(),
        generation: 1,
        host: "/run/branchpool/e/abc".to_owned(),
        port: 5432,
        database: "app".to_owned(),
        user: "app_owner".to_owned(),
        password: None,
        ca: None,
        uri: "postgresql://app_owner@/app?host=/run/branchpool/e/abc".to_owned(),
        socket: "/run/e".to_owned(),
        holder: None,
        bound_at: 1_000_000,
        expires_at: 2_800_000,
        observed_reset_token: None,
        restarts: 0,
        connections: None,
        last_used_at: None,
    }
}

fn shop() -> PoolStatus {
    PoolStatus {
        uid: "p1".to_owned(),
        name: PoolName::new("default", "shop"),
        observed_generation: 1,
        desired: 16,
        max_branches: 40,
        ready: 12,
        warming: 4,
        snapshotting: 1,
        starting: 3,
        preconnecting: 0,
        leased: 2,
        cleaning: 0,
        quarantined: 0,
        tombstones: 0,
        stale: 0,
        golden: GoldenStatus {
            phase: GoldenPhase::Sealed,
            generation: 3,
            message: None,
            bytes: 0,
        },
        conditions: Vec::new(),
        retry_at: None,
    }
}

fn condition(status: &str, reason: &str) -> Condition {
    Condition {
        kind: "Ready".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: "The data directory is of major 14; use 15.".to_owned(),
    }
}

#[test]
fn pools_look_as_kubectl_shows_things() {
    let mut failing = shop();
    failing.name = PoolName::new("staging", "orders-archive");
    failing.conditions = vec![condition("False", "WrongMajor")];
    failing.golden.phase = GoldenPhase::Failed;
    let mut building = shop();
    building.golden.phase = GoldenPhase::Building;
    building.golden.generation = 0;
    building.conditions = vec![condition("True", "AllWell")];
    let expected = "\
NAMESPACE   NAME             READY   WARMING   LEASED   MAX   GOLDEN       STATUS
default     shop             12/16   4         2        40    3            Unknown
staging     orders-archive   12/16   4         2        40    3 (Failed)   WrongMajor
default     shop             12/16   4         2        40    Building     Ready
";
    assert_eq!(pools(&[shop(), failing.clone(), building]), expected);
    assert_eq!(pools(&[]), "No pools found.\n");
    let detail = pool(&failing);
    assert!(
        detail.ends_with(
            "\n
CONDITION   STATUS   REASON       MESSAGE
Ready       False    WrongMajor   The data directory is of major 14; use 15.
"
        ),
        "{detail}"
    );
}

#[test]
fn leases_show_what_is_left_of_them() {
    let mut restarting = lease("ci-7");
    restarting.reason = Some("Restarting".to_owned());
    restarting.holder = Some("CI job 7".to_owned());
    restarting.connections = Some(3);
    restarting.last_used_at = Some(1_120_000);
    let mut unused = lease("new");
    unused.connections = Some(0);
    let mut expired = lease("old");
    expired.phase = LeasePhase::Expired;
    expired.expires_at = 1_100_000;
    let expected = "\
ID     POOL           PHASE                BRANCH          AGE    EXPIRES-IN   CLIENTS     LAST-USED   HOLDER
l1     default/shop   Bound                abcdefghijklm   2m5s   27m55s       <unknown>   <unknown>   <none>
ci-7   default/shop   Bound (Restarting)   abcdefghijklm   2m5s   27m55s       3           5s          CI job 7
new    default/shop   Bound                abcdefghijklm   2m5s   27m55s       0           <never>     <none>
old    default/shop   Expired              abcdefghijklm   2m5s   0s           <unknown>   <unknown>   <none>
";
    assert_eq!(
        leases(&[lease("l1"), restarting, unused, expired], 1_125_000),
        expected
    );
    assert_eq!(leases(&[], 0), "No leases found.\n");
}

#[test]
fn objects_are_the_apis_in_both_formats() {
    let json = formatted(Format::Json, &lease("l1")).unwrap();
    let back: Lease = serde_json::from_str(&json).unwrap();
    assert_eq!(back, lease("l1"));
    assert!(json.contains("\"expiresAt\": 2800000"));
    let mut tricky = lease("l1");
    tricky.uid = "0123".to_owned();
    tricky.holder = Some("yes: # no\n- \"x\"".to_owned());
    let yaml = formatted(Format::Yaml, &tricky).unwrap();
    let back: Lease = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(back, tricky);
    assert!(yaml.contains("expiresAt: 2800000\n"), "{yaml}");
}

#[test]
fn progress_says_what_is_under_way() {
    let mut pool = shop();
    assert_eq!(
        progress(&pool),
        "default/shop: 12 of 16 ready, 1 snapshotting, 3 starting, 2 leased"
    );
    pool.golden.generation = 0;
    pool.golden.phase = GoldenPhase::Building;
    pool.golden.message = Some("running 02-data.sql".to_owned());
    assert_eq!(
        progress(&pool),
        "default/shop: the golden image is being built: running 02-data.sql"
    );
}

#[test]
fn sizes_are_short() {
    for (count, shown) in [
        (0, "0B"),
        (1023, "1023B"),
        (1536, "1.5KiB"),
        (10 << 30, "10.0GiB"),
        (5000 << 40, "5000.0TiB"),
    ] {
        assert_eq!(bytes(count), shown);
    }
}
