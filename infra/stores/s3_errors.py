"""What an error of the S3 client means: absent, refused, wrong input, or a store that may answer the next time."""

from __future__ import annotations

from infra.errors import InputError, StorageError

CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or credentials_block"

# Told by a status of 400, but about the credentials or the clock.
_CREDENTIAL_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed"}
# Told by a status below 500, but right the next time.
_PASSING_CODES = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",
}


class Unavailable(StorageError):
    """The store did not answer, throttled, or failed on its side: what is retried."""


class Refused(Exception):
    """The condition of a write, or of a read of one version, does not hold."""


def meaning(uri: str, error: Exception) -> Exception:
    """The error to raise in place of `error`; `error` itself where it is none of the store's."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    match error:
        case boto.ClientError():
            return _of_answer(uri, error)
        case boto.NoCredentialsError() | boto.PartialCredentialsError() | boto.CredentialRetrievalError():
            return InputError("root", f"there are no credentials for {uri}; {CREDENTIALS}")
        case boto.SSLError():
            return InputError("root", f"the certificate of the store of {uri} is not trusted: {error}")
        case boto.ParamValidationError():
            return InputError("root", f"{uri} is not a possible address: {error}")
        case ValueError() if "endpoint" in str(error).lower():
            return InputError("AWS_ENDPOINT_URL", f"{error}; it must be like http://host:port")
        case boto.BotoCoreError() | ResponseParserError() | TimeoutError() | ConnectionError():
            return Unavailable(f"{uri}: {error or type(error).__name__}")
        case _ if type(error).__module__.partition(".")[0] == "aiohttp":
            return Unavailable(f"{uri}: {type(error).__name__} {error}")
    return error


def _of_answer(uri: str, error: Exception) -> Exception:
    response = getattr(error, "response", {})
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{code}: {response.get('Error', {}).get('Message', '')}"
    if code == "NoSuchBucket":
        return InputError("root", f"the bucket of {uri} does not exist; create it first")
    if status == 404:
        return FileNotFoundError(uri)
    if status == 412:
        return Refused(uri)
    if status == 416:
        return ValueError(f"{uri} ends before the range that was asked for")
    if (status >= 500 and status != 501) or status in (409, 429) or code in _PASSING_CODES:
        return Unavailable(f"{uri}: {said}")
    if status in (401, 403) or code in _CREDENTIAL_CODES:
        return InputError("root", f"access to {uri} is refused ({said}); {CREDENTIALS} to ones with rights there")
    if 300 <= status < 400 or code in ("InvalidBucketName", "PermanentRedirect"):
        return InputError("root", f"{uri} is not where this endpoint and region look ({said})")
    if status == 501:
        return InputError("root", f"the store of {uri} lacks what is needed ({said})")
    return StorageError(f"{uri}: {said}")
