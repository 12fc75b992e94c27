// Package bucket opens the target of --checkpoints: a folder, or a bucket of S3, Google Cloud Storage or Azure Blob Storage.
//
// Credentials come from the environment of the launcher, as the clients of each cloud take them. They go to that cloud alone: URLs of
// targets, which are written into job.json, have none, and no error has the URL of a request. Workers do not inherit those that no data
// are read with ([Secrets]).
package bucket

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/find"
)

// IsURL reports whether text names a target and not a run directory.
func IsURL(text string) bool { return strings.Contains(text, "://") }

// Absolute returns the name of a target that does not depend on the working directory.
func Absolute(text string) (string, error) {
	if text == "" || IsURL(text) {
		return text, nil
	}
	return filepath.Abs(text)
}

// clouds are the schemes of buckets.
var clouds = map[string]struct {
	open func(text, bucket, prefix string, query url.Values) (archive.Bucket, error)
	keys []string // that may follow the ? of a URL, and what they are

	// secrets are the environment variables that give access to the bucket by themselves. Those of S3 are not among them: workers
	// read data from such buckets with the same keys.
	secrets []string

	files []string // environment variables with the names of files that the client reads
}{
	"s3": {openS3, []string{"endpoint=URL", "region=NAME"}, nil, []string{"AWS_SHARED_CREDENTIALS_FILE"}},
	"gs": {openGCS, nil, nil, []string{"GOOGLE_APPLICATION_CREDENTIALS"}},
	"azblob": {openAzure, []string{"account=NAME", "endpoint=URL"}, []string{
		"AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_CLIENT_SECRET", "AZURE_CLIENT_CERTIFICATE_PASSWORD",
	}, []string{"AZURE_CLIENT_CERTIFICATE_PATH", "AZURE_FEDERATED_TOKEN_FILE"}},
}

// known says what a target may be.
const known = "give a folder, file:///PATH, s3://BUCKET/RUN, gs://BUCKET/RUN or azblob://CONTAINER/RUN"

// Secrets returns the environment variables of a target that workers do not get.
func Secrets(text string) []string {
	scheme, _, _ := strings.Cut(text, "://")
	return clouds[scheme].secrets
}

// Open opens a target: file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, azblob://CONTAINER/PREFIX, or the path of a folder. The
// environment has the credentials. Nothing is asked of a server yet.
func Open(text string) (archive.Bucket, error) {
	if !IsURL(text) {
		path, err := filepath.Abs(text)
		return archive.Folder{Path: path}, err
	}
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("it is no URL: " + known)
	}
	if u.Scheme == "file" {
		if (u.Host != "" && u.Host != "localhost") || u.Path == "" {
			return nil, errors.New("give file:///PATH")
		}
		return archive.Folder{Path: filepath.Clean(filepath.FromSlash(u.Path))}, nil
	}
	cloud, ok := clouds[u.Scheme]
	if !ok {
		return nil, fmt.Errorf("%s:// is not known: %s", u.Scheme, known)
	}
	if u.Host == "" || u.User != nil {
		kind := "BUCKET"
		if u.Scheme == "azblob" {
			kind = "CONTAINER"
		}
		return nil, fmt.Errorf("give %s://%s/RUN, and credentials in the environment", u.Scheme, kind)
	}
	query := u.Query()
	for key := range query {
		if !slices.ContainsFunc(cloud.keys, func(k string) bool { return strings.HasPrefix(k, key+"=") }) {
			if len(cloud.keys) == 0 {
				return nil, fmt.Errorf("%s is not known: %s:// takes nothing behind ?", key, u.Scheme)
			}
			return nil, fmt.Errorf("%s is not known: behind ? give %s", key, strings.Join(cloud.keys, " or "))
		}
	}
	if err := find.Credentials(cloud.files...); err != nil {
		return nil, err
	}
	prefix := strings.Trim(u.Path, "/")
	if prefix != "" {
		prefix += "/"
	}
	return cloud.open(text, u.Host, prefix, query)
}

// server parses the URL of a server.
func server(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Scheme != "https" && u.Scheme != "http" {
		return nil, errors.New("endpoint is not the URL of a server: give https://HOST or http://HOST:PORT")
	}
	return u, nil
}

// maxListed bounds the objects of a run.
const maxListed = 1 << 20

// The clear errors of servers.
func noBucket(name string) error {
	return fmt.Errorf("there is no bucket %s: make it, or give another one", name)
}

func refused(why, fix string) error { return fmt.Errorf("access is refused (%s): check %s", why, fix) }

// line makes one line of bounded length of what a client says. Clients quote the URL of a request, which may have a secret, in errors of
// the network: these are left out.
func line(err error) error {
	var request *url.Error
	if errors.As(err, &request) {
		err = request.Err
	}
	const most = 300
	text := strings.Join(strings.Fields(err.Error()), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return &told{text, err}
}

// told is an error with another text.
type told struct {
	text string
	err  error
}

func (t *told) Error() string { return t.text }
func (t *told) Unwrap() error { return t.err }
