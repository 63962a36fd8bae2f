//! Answers: JSON, and problems with their headers.

use std::time::Duration;

use axum::{
    body::Body,
    http::{
        HeaderValue, StatusCode,
        header::{ALLOW, CONTENT_TYPE, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use branchpool_agent_api::problem::{PROBLEM_MEDIA_TYPE, Problem};
use serde::Serialize;

/// An answer that is not 2xx.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) Problem);

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(problem) = self;
        let status =
            StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = with_json(status, PROBLEM_MEDIA_TYPE, &problem);
        if let Some(milliseconds) = problem.retry_after_ms {
            let seconds = Duration::from_millis(milliseconds)
                .as_millis()
                .div_ceil(1000);
            if let Ok(value) = HeaderValue::try_from(seconds.to_string()) {
                response.headers_mut().insert(RETRY_AFTER, value);
            }
        }
        response
    }
}

pub(super) fn json<T: Serialize>(status: StatusCode, body: &T) -> Response {
    with_json(status, "application/json", body)
}

fn with_json<T: Serialize>(status: StatusCode, media_type: &'static str, body: &T) -> Response {
    let Ok(json) = serde_json::to_vec(body) else {
        // Wire types hold no maps with other than string keys, the only thing that JSON refuses.
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let mut response = Response::new(Body::from(json));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

/// Turns what the router itself refuses (no such path, method or encoding) into a problem as well.
pub(super) fn as_problem(path: &str, response: Response) -> Response {
    let status = response.status();
    let is_refusal = status.is_client_error() || status.is_server_error();
    let told = |media_type| has_media_type(&response, media_type);
    if !is_refusal || told(PROBLEM_MEDIA_TYPE) || told("application/json") {
        return response;
    }
    let allow = response.headers().get(ALLOW).cloned();
    let problem = match status {
        StatusCode::NOT_FOUND => Problem::new(
            404,
            "NoSuchPath",
            format!(
                "{path} is no path of this API; its paths start with /v1/node, /v1/pools, /v1/leases and /v1/watch"
            ),
        ),
        StatusCode::METHOD_NOT_ALLOWED => {
            let allowed = allow.as_ref().and_then(|value| value.to_str().ok());
            Problem::new(
                405,
                "MethodNotAllowed",
                format!("{path} allows only {}", allowed.unwrap_or("other methods")),
            )
        }
        StatusCode::BAD_REQUEST => Problem::new(
            400,
            "BadRequest",
            format!("{path} is not valid percent-encoded UTF-8"),
        ),
        other => Problem::new(
            other.as_u16(),
            "Failed",
            "the request failed inside the agent; its log says more",
        ),
    };
    let mut answer = Refusal(problem).into_response();
    if let Some(allow) = allow {
        answer.headers_mut().insert(ALLOW, allow);
    }
    answer
}

fn has_media_type(response: &Response, media_type: &str) -> bool {
    response
        .headers()
        .get(CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes() == media_type.as_bytes())
}
