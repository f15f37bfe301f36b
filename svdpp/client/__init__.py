"""Client of `svdpp serve`, for `svdpp run --server`: a server makes the clips of a jobs file."""
