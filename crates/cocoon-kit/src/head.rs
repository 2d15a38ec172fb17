//! The answer to a HEAD.
//!
//! Entry point: [`answer`]. Over HTTP/1.1 hyper leaves the body out by itself, over HTTP/2 it sends it, and then
//! clients call the stream broken.

use http::{
    Method, Response,
    header::{self, HeaderValue},
};
use http_body::Body;

/// What is sent as the answer to a request of `method`: for HEAD the same without its body, whose length stays
/// where it is known.
pub fn answer<B: Body + Default>(method: &Method, response: Response<B>) -> Response<B> {
    if method != Method::HEAD {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact() {
        parts.headers.entry(header::CONTENT_LENGTH).or_insert_with(|| HeaderValue::from(length));
    }
    Response::from_parts(parts, B::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_is_answered_with_the_length_of_the_body_and_without_it_and_the_rest_is_left_alone() {
        for (method, body, length) in
            [(Method::HEAD, "", Some("2")), (Method::GET, "ok", None), (Method::POST, "ok", None)]
        {
            let answer = answer(&method, Response::new("ok".to_owned()));
            assert_eq!(answer.body(), body, "{method}");
            let found = answer.headers().get(header::CONTENT_LENGTH);
            assert_eq!(found.map(|value| value.to_str().unwrap()), length, "{method}");
        }
    }
}
