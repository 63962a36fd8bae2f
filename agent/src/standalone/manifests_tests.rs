//! Real files, changed as editors, tools and the kubelet change them.

use std::os::unix::fs::symlink;
use std::sync::mpsc;

use super::*;

/// Longer than any machine takes; only a test that fails waits this long.
const PATIENCE: Duration = Duration::from_secs(30);

fn pool(name: &str, replicas: u32) -> String {
    format!(
        "apiVersion: branchpool.dev/v1alpha1\nkind: BranchPool\nmetadata: {{name: {name}}}\nspec:\n  replicas: {replicas}\n  source: {{sql: {{}}}}\n  postgres: {{version: 15}}\n"
    )
}

/// The pools and their replicas.
fn summary(loaded: &Loaded) -> Result<Vec<(String, u32)>, String> {
    match loaded {
        Ok(manifests) => Ok((manifests.pools.iter())
            .map(|pool| (pool.metadata.name.clone().unwrap(), pool.spec.replicas))
            .collect()),
        Err(error) => Err(error.to_string()),
    }
}

fn set(pools: &[(&str, u32)]) -> Vec<(String, u32)> {
    pools
        .iter()
        .map(|(name, replicas)| ((*name).to_owned(), *replicas))
        .collect()
}

/// Waits until exactly this set is delivered.
async fn expect(receiver: &mut watch::Receiver<Loaded>, pools: &[(&str, u32)]) {
    let wanted = Ok(set(pools));
    expect_that(receiver, |found| *found == wanted).await;
}

async fn expect_that(
    receiver: &mut watch::Receiver<Loaded>,
    holds: impl Fn(&Result<Vec<(String, u32)>, String>) -> bool,
) {
    let wait = receiver.wait_for(|loaded| holds(&summary(loaded)));
    let outcome = tokio::time::timeout(PATIENCE, wait)
        .await
        .map(|found| found.map(drop));
    assert!(
        outcome.is_ok(),
        "last delivered: {:?}",
        summary(&receiver.borrow())
    );
    outcome.unwrap().unwrap();
}

async fn watching(path: &Path) -> watch::Receiver<Loaded> {
    watch(&[path.to_owned()]).await.unwrap()
}

#[tokio::test]
async fn delivers_each_edit_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    fs::write(&file, pool("a", 1)).unwrap();
    let mut receiver = watching(directory.path()).await;
    assert_eq!(summary(&receiver.borrow_and_update()), Ok(set(&[("a", 1)])));
    for replicas in 2..5 {
        fs::write(&file, pool("a", replicas)).unwrap();
        expect(&mut receiver, &[("a", replicas)]).await;
    }
    fs::write(directory.path().join("b.yml"), pool("b", 7)).unwrap();
    expect(&mut receiver, &[("a", 4), ("b", 7)]).await;
    fs::remove_file(&file).unwrap();
    expect(&mut receiver, &[("b", 7)]).await;
}

#[tokio::test]
async fn sees_files_replaced_by_rename() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    fs::write(&file, pool("a", 1)).unwrap();
    for path in [directory.path(), &file] {
        fs::write(&file, pool("a", 1)).unwrap();
        let mut receiver = watching(path).await;
        for replicas in 2..5 {
            let new = directory.path().join(".a.yaml.new");
            fs::write(&new, pool("a", replicas)).unwrap();
            fs::rename(&new, &file).unwrap();
            expect(&mut receiver, &[("a", replicas)]).await;
        }
    }
}

/// As the kubelet updates a mounted volume.
#[tokio::test]
async fn sees_a_swapped_link() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let publish = |version: u32| {
        let data = at(&format!("..{version}"));
        fs::create_dir(&data).unwrap();
        fs::write(data.join("a.yaml"), pool("a", version)).unwrap();
        symlink(format!("..{version}"), at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
    };
    publish(1);
    symlink("..data/a.yaml", at("a.yaml")).unwrap();
    for path in [directory.path().to_owned(), at("a.yaml")] {
        let mut receiver = watching(&path).await;
        let first = summary(&receiver.borrow()).unwrap()[0].1;
        for version in first + 1..first + 4 {
            publish(version);
            fs::remove_dir_all(at(&format!("..{}", version - 1))).unwrap();
            expect(&mut receiver, &[("a", version)]).await;
        }
    }
}

#[tokio::test]
async fn sees_changes_behind_links_to_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let target = elsewhere.path().join("pool");
    fs::write(&target, pool("a", 1)).unwrap();
    symlink(&target, directory.path().join("a.yaml")).unwrap();
    let mut receiver = watching(directory.path()).await;
    fs::write(&target, pool("a", 2)).unwrap();
    expect(&mut receiver, &[("a", 2)]).await;
}

#[tokio::test]
async fn sees_a_directory_made_anew() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("manifests");
    let make = |name: &str, replicas| {
        let path = parent.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("a.yaml"), pool("a", replicas)).unwrap();
    };
    make("manifests", 1);
    let mut receiver = watching(&directory).await;
    for replicas in 2..4 {
        fs::remove_dir_all(&directory).unwrap();
        expect_that(&mut receiver, Result::is_err).await;
        make("manifests", replicas);
        expect(&mut receiver, &[("a", replicas)]).await;
        // And its files are watched.
        fs::write(directory.join("a.yaml"), pool("a", replicas + 10)).unwrap();
        expect(&mut receiver, &[("a", replicas + 10)]).await;
    }
}

#[tokio::test]
async fn a_broken_edit_is_reported_and_mended() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    fs::write(&file, pool("a", 1)).unwrap();
    let mut receiver = watching(directory.path()).await;
    fs::write(&file, pool("a", 1).replace("replicas", "replica")).unwrap();
    let place = format!("{}:5: spec.replica: unknown field", file.display());
    expect_that(&mut receiver, |found| {
        found
            .as_ref()
            .is_err_and(|message| message.contains(&place))
    })
    .await;
    fs::write(&file, pool("a", 1)).unwrap();
    expect(&mut receiver, &[("a", 1)]).await;
}

/// Tools such as `git checkout` remove a file before they write it anew. The pool must not end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_away_for_a_moment_ends_no_pool() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    fs::write(&file, pool("a", 1)).unwrap();
    let mut receiver = watching(directory.path()).await;
    let (sender, delivered) = mpsc::sync_channel(1000);
    let mut observer = receiver.clone();
    let observing = tokio::spawn(async move {
        while observer.changed().await.is_ok() {
            sender.try_send(summary(&observer.borrow())).unwrap();
        }
    });
    for replicas in 2..40 {
        fs::remove_file(&file).unwrap();
        tokio::task::yield_now().await;
        fs::write(&file, "").unwrap();
        fs::write(&file, pool("a", replicas)).unwrap();
    }
    expect(&mut receiver, &[("a", 39)]).await;
    observing.abort();
    for found in delivered.try_iter() {
        assert_eq!(found.map(|pools| pools.len()), Ok(1));
    }
}

#[tokio::test]
async fn other_files_are_no_change() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a.yaml"), pool("a", 1)).unwrap();
    let mut receiver = watching(directory.path()).await;
    receiver.mark_unchanged();
    for name in [".a.yaml.swp", "a.yaml~", "notes.txt", ".hidden.yaml"] {
        fs::write(directory.path().join(name), "{").unwrap();
    }
    fs::create_dir(directory.path().join("nested.yaml")).unwrap();
    fs::write(directory.path().join("b.yaml"), pool("b", 2)).unwrap();
    expect(&mut receiver, &[("a", 1), ("b", 2)]).await;
}

#[tokio::test]
async fn the_watch_ends_with_its_receiver() {
    let directory = tempfile::tempdir().unwrap();
    let changed = Arc::new(Notify::new());
    let reader = Reader::new(&[directory.path().to_owned()], Arc::clone(&changed)).unwrap();
    let (reader, loaded) = reader.load().await;
    let (sender, receiver) = watch::channel(loaded);
    let following = tokio::spawn(follow(reader, changed, sender, Arc::default()));
    drop(receiver);
    tokio::time::timeout(PATIENCE, following)
        .await
        .unwrap()
        .unwrap();
}

#[test]
fn says_what_is_wrong_with_a_path() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let said = |path: PathBuf| read(&[path]).unwrap_err().to_string();

    assert!(said(at("absent")).contains("cannot read"));

    fs::write(at("big.yaml"), vec![b'#'; 1 << 20]).unwrap();
    assert_eq!(read(&[at("big.yaml")]).unwrap(), Manifests::default());
    fs::write(at("big.yaml"), vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(said(at("big.yaml")).contains("larger than 1048576 bytes"));

    fs::write(at("latin1.yaml"), b"# caf\xe9\n").unwrap();
    assert!(said(at("latin1.yaml")).contains("not UTF-8"));

    assert!(said(PathBuf::from("/dev/null")).contains("neither a file nor a directory"));

    fs::create_dir(at("many")).unwrap();
    for number in 0..64 {
        fs::write(at("many").join(format!("{number}.yaml")), "").unwrap();
    }
    assert_eq!(read(&[at("many")]).unwrap(), Manifests::default());
    fs::write(at("many").join("one-more.json"), "").unwrap();
    assert!(said(at("many")).contains("more than 64"));
}

#[test]
fn a_file_that_is_named_twice_is_read_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("a.yaml");
    fs::write(&file, pool("a", 1)).unwrap();
    let paths = [file, directory.path().to_owned()];
    assert_eq!(read(&paths).unwrap().pools.len(), 1);
}
