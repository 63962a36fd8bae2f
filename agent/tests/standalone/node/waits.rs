//! Waiting until a node is as wanted.

use std::time::{Duration, Instant};

use branchpool_agent_api::{Lease, PoolStatus};

use super::{Node, pool_name};

impl Node {
    /// Waits until a pool's status is as wanted, woken by the watch.
    pub(crate) async fn wait_pool(
        &self,
        name: &str,
        wanted: impl Fn(&PoolStatus) -> bool,
    ) -> PoolStatus {
        let pool = pool_name(name);
        let waited = tokio::time::timeout(Duration::from_secs(120), async {
            loop {
                // A lost watch is taken up again: the agent may be killed meanwhile.
                let Ok(mut watch) = self.client.watch(None).await else {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                loop {
                    if let Ok(status) = self.client.pool(&pool).await
                        && wanted(&status)
                    {
                        return status;
                    }
                    match watch.next().await {
                        Ok(Some(_)) => {}
                        Ok(None) | Err(_) => break,
                    }
                }
            }
        });
        let Ok(status) = waited.await else {
            panic!(
                "pool {name} is {:#?}\n{}",
                self.client.pool(&pool).await,
                self.log()
            );
        };
        status
    }

    pub(crate) async fn wait_full(&self, name: &str) -> PoolStatus {
        self.wait_pool(name, |pool| {
            pool.ready == pool.desired && pool.warming == 0 && pool.cleaning == 0
        })
        .await
    }

    /// Waits until a lease is as wanted; the agent may be killed meanwhile.
    pub(crate) async fn wait_lease(&self, uid: &str, wanted: impl Fn(&Lease) -> bool) -> Lease {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let found = self.client.get_lease(uid).await;
            match &found {
                Ok(lease) if wanted(lease) => return lease.clone(),
                Err(error) => assert!(error.is_transport(), "{uid}: {error}"),
                Ok(_) => {}
            }
            assert!(Instant::now() < deadline, "{found:#?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until a pool is not there any more.
    pub(crate) async fn wait_pool_gone(&self, name: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match self.client.pool(&pool_name(name)).await {
                Err(error) if error.is("PoolNotFound") => return,
                found => assert!(Instant::now() < deadline, "{found:#?}\n{}", self.log()),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Asks again until a branch is ready.
    pub(crate) async fn lease_patiently(&self, pool: &str, uid: &str) -> Lease {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match self.lease(pool, uid).await {
                Ok(lease) => return lease,
                Err(error) => assert!(
                    (error.is("NoBranchReady") || error.is_transport())
                        && Instant::now() < deadline,
                    "no lease: {error}\n{}",
                    self.log()
                ),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
