//! Nothing but the examples beside this folder lives in this package.
