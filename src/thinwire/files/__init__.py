"""Files of tensors, and the places they lie in: folders, web servers, object stores."""
