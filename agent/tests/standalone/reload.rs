//! Manifests that change while the agent runs.

use std::{fs, time::Duration};

use branchpool_agent_api::{Change, Condition, GoldenPhase, LeasePhase, PoolStatus, RenewRequest};

use crate::node::{Node, Setup, ask, connect, pool, pool_name};

const PATIENCE: Duration = Duration::from_mins(2);

/// The table's rows, and one setting that the pool gives.
const LOOK: &str =
    "SELECT string_agg(body, ',' ORDER BY id) || ' ' || current_setting('work_mem') FROM items";

/// The pool `items`, with its parts that the tests edit.
#[derive(Clone)]
struct Manifest {
    replicas: u32,
    work_mem: &'static str,
    /// SQL that runs after the table was filled.
    last: &'static str,
}

impl Manifest {
    const FIRST: Self = Self {
        replicas: 3,
        work_mem: "4MB",
        last: "SELECT 1",
    };

    fn text(&self) -> String {
        let more = format!(
            "        - name: last\n          sql: {:?}\n  cleanup: {{tombstones: {{delay: 0s}}}}\n",
            self.last
        );
        let parameters = format!(
            "version: 15\n    parameters: {{work_mem: {}}}",
            self.work_mem
        );
        pool("items", self.replicas, 12, &more).replace("version: 15", &parameters)
    }
}

/// As an editor saves: whole, under another name, then in place.
fn save(node: &Node, name: &str, text: &str) {
    let directory = node.manifest_dir();
    let draft = directory.join(".draft");
    fs::write(&draft, text).unwrap();
    fs::rename(draft, directory.join(name)).unwrap();
}

async fn start(manifest: &Manifest) -> Node {
    let node = Node::start(Setup::new(manifest.text())).await;
    node.wait_full("items").await;
    node
}

/// Looks into a branch of its own.
async fn look(node: &Node, uid: &str) -> String {
    let lease = node.lease_patiently("items", uid).await;
    ask(&connect(&lease).await.unwrap(), LOOK).await.unwrap()
}

/// The changes of pool `items` from before `edit` until `done`, each of them.
async fn changes(
    node: &Node,
    edit: impl FnOnce(),
    done: impl Fn(&PoolStatus) -> bool,
) -> Vec<PoolStatus> {
    let mut watch = node.client.watch(None).await.unwrap();
    edit();
    let mut seen = Vec::new();
    let following = async {
        loop {
            let event = watch.next().await.unwrap().expect("the watch goes on");
            if let Change::Pool(status) = event.change
                && status.name == pool_name("items")
            {
                seen.push(*status);
                if done(seen.last().unwrap()) {
                    return;
                }
            }
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, following).await.is_ok();
    assert!(in_time, "{:#?}\n{}", seen.last(), node.log());
    seen
}

/// Never without what was ready, and a lease was always answered at once.
fn assert_never_below(seen: &[PoolStatus], ready: u32) {
    for status in seen {
        assert!(status.ready >= ready, "{status:#?}");
        let available = status
            .conditions
            .iter()
            .find(|c| c.kind == "Available")
            .unwrap();
        assert_eq!(available.status, "True", "{status:#?}");
    }
}

fn entries(node: &Node, directory: &str) -> Vec<String> {
    let directory = node.root().join(directory);
    let Ok(names) = fs::read_dir(directory) else {
        return Vec::new();
    };
    names
        .map(|name| name.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// What the node says is wrong with its manifests.
async fn complaint(node: &Node) -> Option<Condition> {
    let status = node.client.node().await.unwrap();
    status
        .conditions
        .into_iter()
        .find(|c| c.kind == "Manifests")
}

async fn wait_complaint(node: &Node, wanted: bool) -> Option<Condition> {
    let waited = tokio::time::timeout(PATIENCE, async {
        loop {
            let found = complaint(node).await;
            if found.is_some() == wanted {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("{}", node.log()))
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_and_parameters_change_under_leases() {
    let mut manifest = Manifest::FIRST;
    let mut node = start(&manifest).await;
    let kept = node.lease("items", "kept").await.unwrap();
    let client = connect(&kept).await.unwrap();
    ask(&client, "INSERT INTO items VALUES (4, 'mine')")
        .await
        .unwrap();
    node.wait_full("items").await;

    manifest.replicas = 5;
    let settled = |ready| {
        move |pool: &PoolStatus| pool.ready == ready && pool.desired == ready && pool.cleaning == 0
    };
    let seen = changes(
        &node,
        || save(&node, "pools.yaml", &manifest.text()),
        settled(5),
    )
    .await;
    assert_never_below(&seen, 3);
    assert_eq!(seen.last().unwrap().observed_generation, 2);

    manifest.replicas = 2;
    let seen = changes(
        &node,
        || save(&node, "pools.yaml", &manifest.text()),
        settled(2),
    )
    .await;
    assert_never_below(&seen, 2);
    assert_eq!(node.postmasters().len(), 3);

    manifest.work_mem = "5MB";
    let replaced = |pool: &PoolStatus| {
        pool.observed_generation == 4
            && (pool.ready, pool.stale, pool.warming, pool.cleaning) == (2, 0, 0, 0)
    };
    let seen = changes(
        &node,
        || save(&node, "pools.yaml", &manifest.text()),
        replaced,
    )
    .await;
    assert_never_below(&seen, 2);
    assert!(seen.iter().any(|pool| pool.stale > 0), "{seen:#?}");
    assert!(
        seen.iter().all(|pool| pool.golden.generation == 1),
        "the image is the same"
    );

    assert_eq!(ask(&client, LOOK).await.unwrap(), "one,two,three,mine 4MB");
    assert_eq!(look(&node, "new").await, "one,two,three 5MB");
    // A reset is a fresh branch, and so of the settings in force.
    let reset = node.reset("kept", "once").await.unwrap();
    assert_eq!(reset.uri, kept.uri);
    let fresh = connect(&reset).await.unwrap();
    assert_eq!(ask(&fresh, LOOK).await.unwrap(), "one,two,three 5MB");

    // What is saved again as it was changes nothing.
    save(
        &node,
        "pools.yaml",
        &format!("# as before\n{}", manifest.text()),
    );
    save(&node, "other.yaml", &pool("other", 0, 1, ""));
    node.wait_pool("other", |_| true).await;
    let status = node.client.pool(&pool_name("items")).await.unwrap();
    assert_eq!(status.observed_generation, 4);
    assert!(node.stop().success());
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_source_is_built_beside_the_old_one() {
    let mut manifest = Manifest::FIRST;
    let mut node = start(&manifest).await;
    let kept = node.lease("items", "kept").await.unwrap();
    assert_eq!(kept.generation, 1);
    node.wait_full("items").await;

    manifest.last = "INSERT INTO items VALUES (5, 'five')";
    let replaced = |generation| {
        move |pool: &PoolStatus| {
            pool.golden.generation == generation
                && pool.golden.phase == GoldenPhase::Sealed
                && (pool.ready, pool.stale, pool.warming, pool.cleaning) == (3, 0, 0, 0)
        }
    };
    let seen = changes(
        &node,
        || save(&node, "pools.yaml", &manifest.text()),
        replaced(2),
    )
    .await;
    assert_never_below(&seen, 3);
    assert!(
        seen.iter()
            .any(|pool| pool.golden.phase == GoldenPhase::Building),
        "{seen:#?}"
    );
    let client = connect(&kept).await.unwrap();
    assert_eq!(ask(&client, LOOK).await.unwrap(), "one,two,three 4MB");
    assert_eq!(look(&node, "new").await, "one,two,three,five 4MB");

    // SQL that fails leaves what serves, and says why.
    manifest.last = "INSERT INTO nowhere VALUES (1)";
    let failed = |pool: &PoolStatus| pool.golden.phase == GoldenPhase::Failed;
    let seen = changes(
        &node,
        || save(&node, "pools.yaml", &manifest.text()),
        failed,
    )
    .await;
    assert_never_below(&seen, 2);
    let status = seen.last().unwrap();
    assert_eq!(status.golden.generation, 2, "{status:#?}");
    let message = status.golden.message.clone().unwrap();
    assert!(
        message.contains("nowhere") && message.contains("last"),
        "{message}"
    );
    let source = status
        .conditions
        .iter()
        .find(|c| c.kind == "SourceReady")
        .unwrap();
    assert_eq!((&*source.status, &*source.reason), ("True", "BuildFailed"));
    assert_eq!(look(&node, "meanwhile").await, "one,two,three,five 4MB");

    // From a ConfigMap in the same directory, whose scripts come first.
    let scripts = |body| {
        format!(
            "apiVersion: v1
kind: ConfigMap
metadata: {{name: scripts}}
data:
  1-table.sql: CREATE TABLE items (id integer PRIMARY KEY, body text NOT NULL);
  2-rows.sql: INSERT INTO items VALUES (1, '{body}');
"
        )
    };
    let source = "apiVersion: branchpool.dev/v1alpha1
kind: BranchPool
metadata: {name: items}
spec:
  replicas: 3
  maxBranches: 12
  postgres: {version: 15}
  source: {sql: {configMapRef: {name: scripts}}}
  cleanup: {tombstones: {delay: 0s}}
";
    let seen = changes(
        &node,
        || {
            save(&node, "scripts.yaml", &scripts("mapped"));
            save(&node, "pools.yaml", source);
        },
        replaced(4),
    )
    .await;
    assert_never_below(&seen, 2);
    assert_eq!(look(&node, "mapped").await, "mapped 4MB");
    let seen = changes(
        &node,
        || save(&node, "scripts.yaml", &scripts("again")),
        replaced(5),
    )
    .await;
    assert_never_below(&seen, 2);
    assert_eq!(look(&node, "again").await, "again 4MB");

    // An image goes with the last lease on it.
    for uid in ["kept", "new", "meanwhile", "mapped", "again"] {
        node.client.release(uid, None).await.unwrap();
    }
    let status = node
        .wait_pool("items", |pool| {
            pool.ready == 3 && pool.leased + pool.cleaning + pool.tombstones == 0
        })
        .await;
    let images = entries(&node, &format!("golden/{}", status.uid));
    assert_eq!(images, ["5"]);
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// What is connected to is the image's, not what the pool will have one day.
#[tokio::test(flavor = "multi_thread")]
async fn another_role_and_database_come_with_the_image_that_has_them() {
    let mut manifest = Manifest::FIRST;
    let mut node = start(&manifest).await;
    let kept = node.lease("items", "kept").await.unwrap();
    node.wait_full("items").await;

    // Leases are taken, and their branches made up for, while the new image is being built.
    manifest.last = "SELECT pg_sleep(3)";
    let text = manifest.text().replace(
        "version: 15",
        "version: 15\n    database: stock\n    role: keeper",
    );
    let building = |pool: &PoolStatus| pool.golden.phase == GoldenPhase::Building;
    changes(&node, || save(&node, "pools.yaml", &text), building).await;
    for uid in ["a", "b", "c", "d"] {
        let lease = node.lease_patiently("items", uid).await;
        let names = (&lease.user, &lease.database, lease.generation);
        assert_eq!(names, (&kept.user, &kept.database, 1));
        let client = connect(&lease).await.unwrap();
        assert_eq!(ask(&client, LOOK).await.unwrap(), "one,two,three 4MB");
    }
    let status = node.client.pool(&pool_name("items")).await.unwrap();
    assert_eq!(
        status.golden.phase,
        GoldenPhase::Building,
        "the build was too short"
    );
    let status = node
        .wait_pool("items", |pool| {
            pool.golden.generation == 2 && (pool.ready, pool.stale, pool.warming) == (3, 0, 0)
        })
        .await;
    assert_eq!(status.quarantined, 0, "{status:#?}");

    // A server of the old image comes back as it was.
    let server = node.postmaster_of(&kept.branch).unwrap();
    crate::node::send(server, rustix::process::Signal::KILL);
    node.wait_lease("kept", |lease| {
        lease.restarts == 1 && lease.reason.is_none()
    })
    .await;
    let client = connect(&kept).await.unwrap();
    assert_eq!(ask(&client, LOOK).await.unwrap(), "one,two,three 4MB");

    let reset = node.reset("kept", "once").await.unwrap();
    assert_eq!(
        (&*reset.user, &*reset.database, &reset.host),
        ("keeper", "stock", &kept.host)
    );
    let client = connect(&reset).await.unwrap();
    assert_eq!(ask(&client, LOOK).await.unwrap(), "one,two,three 4MB");
    assert!(node.stop().success());
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_manifests_change_nothing_and_a_removed_pool_ends_with_its_leases() {
    let mut manifest = Manifest::FIRST;
    let mut node = start(&manifest).await;
    assert_eq!(complaint(&node).await, None);
    let kept = node.lease("items", "kept").await.unwrap();
    node.wait_full("items").await;

    manifest.replicas = 4;
    let good = manifest.text();
    for (broken, says) in [
        (format!("{good}  : ["), "pools.yaml"),
        (good.replace("replicas: 4", "replicsa: 4"), "spec.replicsa"),
        (good.replace("replicas: 4", "replicas: 400"), "maxBranches"),
        (format!("{good}---\n{good}"), "items"),
        (good.replace("version: 15", "version: 18"), "Postgres 18"),
    ] {
        save(&node, "pools.yaml", &broken);
        let found = wait_complaint(&node, true).await.unwrap();
        assert_eq!((&*found.status, &*found.reason), ("False", "Refused"));
        assert!(found.message.contains(says), "{says}: {}", found.message);
        let status = node.client.pool(&pool_name("items")).await.unwrap();
        assert_eq!((status.ready, status.desired), (3, 3), "{broken}");
        save(&node, "pools.yaml", &Manifest::FIRST.text());
        wait_complaint(&node, false).await;
    }
    assert_eq!(
        node.client
            .pool(&pool_name("items"))
            .await
            .unwrap()
            .observed_generation,
        1
    );
    save(&node, "pools.yaml", &good);
    node.wait_pool("items", |pool| pool.ready == 4).await;

    // While the agent is away as well.
    let uid = node.client.pool(&pool_name("items")).await.unwrap().uid;
    assert!(node.stop().success());
    fs::remove_file(node.manifest_dir().join("pools.yaml")).unwrap();
    save(&node, "other.yaml", &pool("other", 1, 2, ""));
    node.restart().await;
    let status = node
        .wait_pool("items", |pool| {
            pool.ready + pool.warming + pool.cleaning == 0
        })
        .await;
    assert_eq!((status.desired, status.leased), (0, 1));
    let removed = status
        .conditions
        .iter()
        .find(|c| c.kind == "Ready")
        .unwrap();
    assert_eq!((&*removed.status, &*removed.reason), ("False", "Removed"));
    let refused = node.lease("items", "late").await.unwrap_err();
    assert!(refused.is("PoolNotFound"), "{refused}");
    assert!(
        !refused.to_string().contains("default/items, "),
        "{refused}"
    );

    // Its server was stopped with the agent.
    node.wait_lease("kept", |lease| lease.reason.is_none())
        .await;
    let client = connect(&kept).await.unwrap();
    assert_eq!(ask(&client, LOOK).await.unwrap(), "one,two,three 4MB");
    drop(client);
    let renewed = node
        .client
        .renew("kept", &RenewRequest::default())
        .await
        .unwrap();
    assert_eq!(renewed.phase, LeasePhase::Bound);
    let refused = node.reset("kept", "once").await.unwrap_err();
    assert!(refused.to_string().contains("removed"), "{refused}");
    let client = connect(&renewed).await.unwrap();
    assert_eq!(
        ask(&client, LOOK).await.unwrap(),
        "one,two,three 4MB",
        "a refused reset leaves the branch"
    );
    drop(client);

    node.client.release("kept", None).await.unwrap();
    node.wait_pool_gone("items").await;
    node.wait_full("other").await;
    assert!(entries(&node, &format!("golden/{uid}")).is_empty());
    assert_eq!(node.postmasters().len(), 1);
    let branches: usize = entries(&node, "branches")
        .iter()
        .map(|shard| entries(&node, &format!("branches/{shard}")).len())
        .sum();
    assert_eq!(branches, 1, "only the other pool's");
    let runs = fs::read_dir(node.run_dir().join("b")).unwrap();
    assert_eq!(runs.count(), 1, "run directories");
    node.wait_addresses(1);
    assert!(!node.run_dir().join("auth").join(&uid).exists());

    // The same name again is a pool like any other.
    save(&node, "pools.yaml", &good);
    node.wait_pool("items", |pool| pool.ready == 4).await;
    assert_eq!(look(&node, "back").await, "one,two,three 4MB");
    assert!(node.stop().success());
    node.assert_nothing_left();
}
