//! One request to the operator.

use std::{fmt, io, str::FromStr, sync::Arc};

use branchpool_agent_api::{Problem, problem::PROBLEM_MEDIA_TYPE};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    client::conn::http1,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue},
    http::uri::Authority,
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use snafu::{ResultExt, Snafu, ensure};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{EnrolAnswer, EnrolRequest, PATH};

const MAX_ANSWER: usize = 64 << 10;
const DEFAULT_PORT: u16 = 443;

/// Where the operator is: `https://HOST[:PORT]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    name: ServerName<'static>,
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "https://{}:{}", self.host, self.port)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || "must be https://HOST:PORT and nothing after it".to_owned();
        let rest = text.strip_prefix("https://").ok_or_else(wrong)?;
        let authority: Authority = rest
            .strip_suffix('/')
            .unwrap_or(rest)
            .parse()
            .map_err(|_| wrong())?;
        let host = authority.host();
        if authority.as_str().contains('@') {
            return Err(wrong());
        }
        let has_port = authority.as_str().len() > host.len();
        let port = match authority.port_u16() {
            Some(port) => port,
            None if has_port => return Err(wrong()),
            None => DEFAULT_PORT,
        };
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(bare.to_owned())
            .map_err(|_| format!("{host} is neither a DNS name nor an address"))?;
        Ok(Self {
            host: host.to_owned(),
            port,
            name,
        })
    }
}

#[derive(Debug, Snafu)]
pub enum CallError {
    #[snafu(display("the operator at {address} is not reached: {source}"))]
    Connect { address: Address, source: io::Error },

    #[snafu(display("who answers at {address} is not the operator by its certificate: {source}"))]
    Handshake { address: Address, source: io::Error },

    #[snafu(display("the connection to {address} broke: {source}"))]
    Broken {
        address: Address,
        source: hyper::Error,
    },

    #[snafu(display(
        "the token holds characters that no HTTP header carries; check the file it is from"
    ))]
    Token,

    #[snafu(display("the operator at {address} refuses ({}): {problem}", problem.reason))]
    Refused {
        address: Address,
        #[snafu(source(from(Problem, Box::new)))]
        problem: Box<Problem>,
    },

    #[snafu(display("{address} answered {status} with a body that is not the operator's"))]
    Unexpected {
        address: Address,
        status: StatusCode,
    },
}

/// Not bounded in time.
pub(super) async fn enrol(
    address: &Address,
    config: Arc<ClientConfig>,
    token: &str,
    request: &EnrolRequest,
) -> Result<EnrolAnswer, CallError> {
    let Ok(mut authorization) = HeaderValue::try_from(format!("Bearer {token}")) else {
        return TokenSnafu.fail();
    };
    authorization.set_sensitive(true);
    let place = format!("{}:{}", address.host, address.port);
    let tcp = TcpStream::connect(&place).await.context(ConnectSnafu {
        address: address.clone(),
    })?;
    let stream = TlsConnector::from(config)
        .connect(address.name.clone(), tcp)
        .await
        .context(HandshakeSnafu {
            address: address.clone(),
        })?;
    let broken = BrokenSnafu {
        address: address.clone(),
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .context(broken.clone())?;
    let body = serde_json::to_vec(request).expect("two texts should make JSON");
    let request = Request::post(PATH)
        .header(HOST, &place)
        .header(AUTHORIZATION, authorization)
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))
        .expect("constant paths and headers should make a request");
    // Ends when the sender is dropped.
    tokio::spawn(connection);
    let response = sender.send_request(request).await.context(broken)?;
    let status = response.status();
    let is_problem = has_media_type(&response, PROBLEM_MEDIA_TYPE);
    let unexpected = UnexpectedSnafu {
        address: address.clone(),
        status,
    };
    let reading = Limited::new(response.into_body(), MAX_ANSWER)
        .collect()
        .await;
    let body = reading.map_err(|_| unexpected.clone().build())?.to_bytes();
    if status.is_success() {
        return serde_json::from_slice(&body).map_err(|_| unexpected.build());
    }
    ensure!(is_problem, unexpected);
    match serde_json::from_slice::<Problem>(&body) {
        Ok(problem) => Err(problem).context(RefusedSnafu {
            address: address.clone(),
        }),
        Err(_) => unexpected.fail(),
    }
}

fn has_media_type(response: &Response<Incoming>, media_type: &str) -> bool {
    let found = response.headers().get(CONTENT_TYPE);
    found.is_some_and(|found| found.as_bytes() == media_type.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_https_addresses_are_read() {
        for (text, shown) in [
            (
                "https://operator.ns.svc:8443",
                "https://operator.ns.svc:8443",
            ),
            ("https://operator.ns.svc/", "https://operator.ns.svc:443"),
            ("https://10.0.0.1:1", "https://10.0.0.1:1"),
            ("https://[::1]:1", "https://[::1]:1"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), shown);
        }
        for bad in [
            "",
            "operator",
            "http://operator:1",
            "https://",
            "https://a/b",
            "https://a:x",
            "https://a:65536",
            "https://me@a",
            "https://a b",
        ] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
