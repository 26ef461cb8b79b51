"""A merged model as a complete folder."""
