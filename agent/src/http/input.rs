//! Strict input: what is not understood is refused, with the field that holds it.

use std::time::Duration;

use axum::{
    body::{Body, HttpBody},
    extract::{Query, Request},
    http::{
        HeaderMap, Uri,
        header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE},
    },
};
use branchpool_agent_api::{
    FieldError, PoolName, Problem,
    check::{self, Check, MAX_TTL_SECONDS},
};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use tokio::time::timeout;

pub(super) const LEASE_BODY_LIMIT: usize = 64 << 10;
pub(super) const POOL_BODY_LIMIT: usize = 1 << 20;
/// A body of the largest size at a modem's speed.
const BODY_TIMEOUT: Duration = Duration::from_secs(15);

/// A JSON body of at most `limit` bytes whose fields hold what they may.
pub(super) async fn json<T: DeserializeOwned + Check>(
    request: Request,
    limit: usize,
) -> Result<T, Problem> {
    check_media_type(request.headers())?;
    let bytes = read(request, limit).await?;
    parse(&bytes)
}

/// As [`json`], and no body at all means the default.
pub(super) async fn json_or_default<T: DeserializeOwned + Check + Default>(
    request: Request,
    limit: usize,
) -> Result<T, Problem> {
    if request.headers().contains_key(CONTENT_TYPE) {
        return json(request, limit).await;
    }
    let bytes = read(request, limit).await?;
    if bytes.is_empty() {
        return Ok(T::default());
    }
    Err(unsupported_media_type("no Content-Type"))
}

/// Refuses a body where none belongs, rather than ignoring what the sender meant by it.
pub(super) fn no_body(request: &Request) -> Result<(), Problem> {
    if request.body().is_end_stream() {
        return Ok(());
    }
    Err(Problem::new(
        400,
        "UnexpectedBody",
        format!("{} takes no body; send none", request.method()),
    ))
}

pub(super) fn uid(value: &str) -> Result<(), Problem> {
    check::uid(value).map_err(|message| Problem::invalid_field("uid", message))
}

pub(super) fn pool_name(name: &PoolName) -> Result<(), Problem> {
    let parts = [("namespace", &name.namespace), ("name", &name.name)];
    let errors: Vec<_> = parts
        .into_iter()
        .filter_map(|(field, value)| Some(FieldError::new(field, check::dns_label(value).err()?)))
        .collect();
    if errors.is_empty() {
        Ok(())
    } else {
        Err(Problem::invalid_fields(errors))
    }
}

/// The query of a request that takes none.
pub(super) fn no_query(uri: &Uri) -> Result<(), Problem> {
    let [] = parameters(uri, [])?;
    Ok(())
}

/// `?epoch=N`.
pub(super) fn epoch(uri: &Uri) -> Result<Option<u64>, Problem> {
    let [epoch] = parameters(uri, ["epoch"])?;
    epoch.map(|value| number("epoch", &value)).transpose()
}

/// `?instance=ID&since=REVISION`, both or neither.
pub(super) fn since(uri: &Uri) -> Result<Option<(String, u64)>, Problem> {
    let [instance, since] = parameters(uri, ["instance", "since"])?;
    match (instance, since) {
        (None, None) => Ok(None),
        (Some(instance), Some(since)) => Ok(Some((instance, number("since", &since)?))),
        (Some(_), None) => Err(Problem::invalid_field(
            "since",
            "must be given with instance",
        )),
        (None, Some(_)) => Err(Problem::invalid_field(
            "instance",
            "must be given with since: revisions of one agent process mean nothing to another",
        )),
    }
}

/// The values of the parameters in `known`, in that order; any other parameter is refused.
fn parameters<const N: usize>(uri: &Uri, known: [&str; N]) -> Result<[Option<String>; N], Problem> {
    let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(uri).map_err(|_| {
        Problem::new(
            400,
            "BadQuery",
            "the query is not of the form name=value&name=value",
        )
    })?;
    let mut values = [const { None }; N];
    for (name, value) in pairs {
        let Some(index) = known.iter().position(|known| *known == name) else {
            let message = match N {
                0 => "is unknown; this path takes no query parameters".to_owned(),
                _ => format!("is unknown; this path takes {}", known.join(", ")),
            };
            return Err(Problem::invalid_field(shortened(&name), message));
        };
        if values[index].replace(value).is_some() {
            return Err(Problem::invalid_field(name, "must be given only once"));
        }
    }
    Ok(values)
}

fn number(name: &str, value: &str) -> Result<u64, Problem> {
    // `parse` would also take a leading '+'.
    let digits_only = value.bytes().all(|byte| byte.is_ascii_digit());
    value
        .parse()
        .ok()
        .filter(|_| digits_only)
        .ok_or_else(|| Problem::invalid_field(name, "must be a whole number, 0 or more"))
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Problem> {
    if headers.contains_key(CONTENT_ENCODING) {
        return Err(unsupported_media_type("a Content-Encoding"));
    }
    let Some(value) = headers.get(CONTENT_TYPE) else {
        return Err(unsupported_media_type("no Content-Type"));
    };
    let text = value.to_str().unwrap_or_default().to_ascii_lowercase();
    let (essence, parameters) = text.split_once(';').unwrap_or((&text, ""));
    let parameters = parameters.trim().replace('"', "");
    if essence.trim() == "application/json" && matches!(&*parameters, "" | "charset=utf-8") {
        return Ok(());
    }
    Err(unsupported_media_type("another Content-Type"))
}

fn unsupported_media_type(found: &str) -> Problem {
    Problem::new(
        415,
        "UnsupportedMediaType",
        format!("the body came with {found}; send plain JSON as Content-Type: application/json"),
    )
}

pub(super) async fn read(request: Request, limit: usize) -> Result<Bytes, Problem> {
    let announced = request
        .headers()
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(too_large(limit));
    }
    let body: Limited<Body> = Limited::new(request.into_body(), limit);
    match timeout(BODY_TIMEOUT, body.collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(limit)),
        Ok(Err(_)) => Err(Problem::new(
            400,
            "BrokenBody",
            "the body ended before its announced end; send it again",
        )),
        Err(_) => Err(Problem::new(
            408,
            "BodyTimeout",
            format!(
                "the body did not arrive within {} s",
                BODY_TIMEOUT.as_secs()
            ),
        )),
    }
}

fn too_large(limit: usize) -> Problem {
    Problem::new(
        413,
        "BodyTooLarge",
        format!("the body is longer than {limit} bytes, the most that this path takes"),
    )
}

fn parse<T: DeserializeOwned + Check>(bytes: &[u8]) -> Result<T, Problem> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value: T = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        refused(&path, &error.into_inner())
    })?;
    json.end().map_err(|error| refused("", &error))?;
    let errors = value.check();
    if errors.is_empty() {
        Ok(value)
    } else {
        Err(Problem::invalid_fields(errors))
    }
}

fn refused(path: &str, error: &serde_json::Error) -> Problem {
    if error.classify() != Category::Data {
        return Problem::new(
            400,
            "MalformedJson",
            format!("the body is not JSON: {error}"),
        );
    }
    let parent = if path == "." { "" } else { path };
    let text = error.to_string();
    // serde_json appends the position, which the field's name says better.
    let text = text
        .rsplit_once(" at line ")
        .map_or(&*text, |(text, _)| text);
    // These two are errors of the object around the field, and name the field in their text.
    let inner = |prefix: &str| text.strip_prefix(prefix)?.strip_suffix('`');
    let (name, message) = if let Some(name) = inner("missing field `") {
        (name, "is missing".to_owned())
    } else if let Some(name) = inner("duplicate field `") {
        (name, "is there more than once".to_owned())
    } else {
        ("", described(parent, text))
    };
    let dot = if parent.is_empty() || name.is_empty() {
        ""
    } else {
        "."
    };
    let field = format!("{}{dot}{name}", shortened(parent));
    Problem::invalid_fields(vec![FieldError::new(field, message)])
}

/// Says in our terms what a field takes where serde only knows its Rust type.
fn described(field: &str, message: &str) -> String {
    if message.starts_with("unknown field") {
        return shortened(message);
    }
    let takes = match field {
        "ttlSeconds" => format!("a whole number of seconds from 1 to {MAX_TTL_SECONDS}"),
        "epoch" | "generation" => "a whole number, 0 or more".to_owned(),
        "pool" => "an object with namespace and name".to_owned(),
        "" => "a JSON object".to_owned(),
        _ => "a string".to_owned(),
    };
    format!("must be {takes} ({})", shortened(message))
}

/// What the sender wrote may be as long as the body; an answer need not be.
fn shortened(text: &str) -> String {
    const LONGEST: usize = 200;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
