"""State synchronisation through a store: a folder that publishers write and followers read, anywhere.

::

    state.json                 the manifest: versions, files, their bytes and hashes; written last
    layout.json                names, shapes, dtypes
    patches/*.safetensors      from one version to a later one
    keyframes/*.safetensors    from nothing to a version

``ShelfWriter`` keeps it up to date with a ``History``, ``ShelfReader`` a copy of it. A folder is a path, an
``http(s)://`` address (to read), or a URL that fsspec knows (``s3://``, ``gs://``, ``sftp://``, ...).
"""
