//! Client of the agent's HTTP API: HTTP/1.1 over a Unix socket, TCP or mutual TLS, with connections
//! kept for the next request.

mod error;
mod target;
mod transport;
mod watch;

use std::fmt::Write as _;

use bytes::Bytes;
use hyper::Method;
use serde::{Serialize, de::DeserializeOwned};

pub use self::{
    error::ClientError,
    target::{Target, Tls},
    watch::Watch,
};
use self::{error::DecodeSnafu, transport::Transport};
use crate::{
    DesiredPool, Lease, LeaseList, LeaseRequest, NodeStatus, PoolList, PoolName, PoolStatus,
    RenewRequest, ResetRequest,
};
use snafu::ResultExt;

/// Cheap to clone; clones share their connections. Every call may be sent twice when a kept
/// connection turns out to be closed, which is safe because the API is idempotent.
#[derive(Clone, Debug)]
pub struct Client {
    transport: Transport,
}

impl Client {
    /// Opens nothing yet.
    pub fn new(target: Target) -> Self {
        Self {
            transport: Transport::new(target, None),
        }
    }

    /// Sends `token` as bearer token with each request.
    pub fn with_token(target: Target, token: &str) -> Result<Self, ClientError> {
        let header = transport::bearer(token)?;
        Ok(Self {
            transport: Transport::new(target, Some(header)),
        })
    }

    pub fn target(&self) -> &Target {
        self.transport.target()
    }

    pub async fn node(&self) -> Result<NodeStatus, ClientError> {
        self.get("/v1/node").await
    }

    pub async fn pools(&self) -> Result<Vec<PoolStatus>, ClientError> {
        let list: PoolList = self.get("/v1/pools").await?;
        Ok(list.pools)
    }

    pub async fn pool(&self, pool: &PoolName) -> Result<PoolStatus, ClientError> {
        let (namespace, name) = (segment(&pool.namespace), segment(&pool.name));
        self.get(&format!("/v1/pools/{namespace}/{name}")).await
    }

    pub async fn apply_pool(
        &self,
        uid: &str,
        desired: &DesiredPool,
    ) -> Result<PoolStatus, ClientError> {
        let path = format!("/v1/pools/{}", segment(uid));
        self.send(Method::PUT, &path, desired).await
    }

    pub async fn remove_pool(&self, uid: &str, epoch: Option<u64>) -> Result<(), ClientError> {
        let path = with_epoch(format!("/v1/pools/{}", segment(uid)), epoch);
        self.transport.request(Method::DELETE, &path, None).await?;
        Ok(())
    }

    pub async fn leases(&self) -> Result<Vec<Lease>, ClientError> {
        let list: LeaseList = self.get("/v1/leases").await?;
        Ok(list.leases)
    }

    pub async fn get_lease(&self, uid: &str) -> Result<Lease, ClientError> {
        self.get(&lease_path(uid)).await
    }

    /// The lease, and whether this call made it.
    pub async fn lease(
        &self,
        uid: &str,
        request: &LeaseRequest,
    ) -> Result<(Lease, bool), ClientError> {
        let answer = self
            .transport
            .request(Method::PUT, &lease_path(uid), Some(encode(request)?))
            .await?;
        let created = answer.status == hyper::StatusCode::CREATED;
        Ok((self.decode(&answer.body)?, created))
    }

    pub async fn renew(&self, uid: &str, request: &RenewRequest) -> Result<Lease, ClientError> {
        let path = format!("{}/renew", lease_path(uid));
        self.send(Method::POST, &path, request).await
    }

    pub async fn reset(&self, uid: &str, request: &ResetRequest) -> Result<Lease, ClientError> {
        let path = format!("{}/reset", lease_path(uid));
        self.send(Method::POST, &path, request).await
    }

    pub async fn release(&self, uid: &str, epoch: Option<u64>) -> Result<Lease, ClientError> {
        let path = with_epoch(lease_path(uid), epoch);
        let answer = self.transport.request(Method::DELETE, &path, None).await?;
        self.decode(&answer.body)
    }

    /// Drops the record of a finished lease.
    pub async fn forget(&self, uid: &str, epoch: Option<u64>) -> Result<(), ClientError> {
        let path = with_epoch(format!("{}/forget", lease_path(uid)), epoch);
        self.transport.request(Method::POST, &path, None).await?;
        Ok(())
    }

    /// The agent's metrics in the `OpenMetrics` text format.
    pub async fn metrics(&self) -> Result<String, ClientError> {
        let answer = self
            .transport
            .request(Method::GET, "/metrics", None)
            .await?;
        Ok(String::from_utf8_lossy(&answer.body).into_owned())
    }

    /// Whether the agent says that it is ready; `Err(Problem)` with its reason when it does not.
    pub async fn ready(&self) -> Result<(), ClientError> {
        self.transport.request(Method::GET, "/readyz", None).await?;
        Ok(())
    }

    /// Changes from `since` (instance and revision) on, or, without it or when the agent cannot go
    /// on from there, a snapshot first. On a connection of its own.
    pub async fn watch(&self, since: Option<(&str, u64)>) -> Result<Watch, ClientError> {
        let path = match since {
            Some((instance, revision)) => {
                format!("/v1/watch?instance={}&since={revision}", segment(instance))
            }
            None => "/v1/watch".to_owned(),
        };
        let (sender, body) = self.transport.open_stream(&path).await?;
        Ok(Watch::new(self.target().clone(), sender, body))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let answer = self.transport.request(Method::GET, path, None).await?;
        self.decode(&answer.body)
    }

    async fn send<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        let body = encode(body)?;
        let answer = self.transport.request(method, path, Some(body)).await?;
        self.decode(&answer.body)
    }

    fn decode<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(body).context(DecodeSnafu {
            target: self.target().clone(),
        })
    }
}

fn encode<B: Serialize>(body: &B) -> Result<Bytes, ClientError> {
    let json = serde_json::to_vec(body).context(error::EncodeSnafu)?;
    Ok(Bytes::from(json))
}

fn lease_path(uid: &str) -> String {
    format!("/v1/leases/{}", segment(uid))
}

fn with_epoch(mut path: String, epoch: Option<u64>) -> String {
    if let Some(epoch) = epoch {
        let _ = write!(path, "?epoch={epoch}");
    }
    path
}

/// Percent-encodes all but RFC 3986's unreserved characters, so that no value can leave its place
/// in the URL.
fn segment(value: &str) -> String {
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_leaves_its_place_in_the_url() {
        assert_eq!(segment("a-b_c.d~9"), "a-b_c.d~9");
        assert_eq!(segment("a/../b?c#d e%"), "a%2F..%2Fb%3Fc%23d%20e%25");
        assert_eq!(segment("ü"), "%C3%BC");
        assert_eq!(with_epoch("/x".to_owned(), Some(3)), "/x?epoch=3");
        assert_eq!(with_epoch("/x".to_owned(), None), "/x");
    }
}
