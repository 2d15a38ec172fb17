//! The plane as its clients see it: requests in, answers and watches out.

mod controllers;
mod kube_client;
mod objects;
mod server;
mod support;
mod watches;
