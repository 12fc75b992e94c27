// Package bucket lets package data read from buckets of S3 servers. It is a package of its own so that programs that read no buckets do
// not carry a client. Import it for its effect:
//
//	import _ "github.com/soliton-train/soliton/data/bucket"
//
//	web, err := data.Tokens(data.Uint16, "s3://corpus/web/*.bin")
//
// A URL names an object, all objects below a folder, or those that match a pattern of [path.Match] with * and [...]. Keys are those of
// every S3 client: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE and AWS_PROFILE, or the role of the machine. AWS_ENDPOINT_URL names a
// server other than Amazon's, and so does ?endpoint=URL behind the URL; ?region=NAME names a region.
//
// Objects that change while a run reads them are an error of the sample.
package bucket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/soliton-train/soliton/data"
	"github.com/soliton-train/soliton/internal/store/find"
)

func init() { data.Register("s3", list) }

// Bounds of what a server may make a process wait for and keep.
const (
	maxListed   = 1 << 20 // objects
	listTimeout = time.Minute
	readTimeout = 30 * time.Second
)

// list returns the objects that a URL names.
func list(pattern string) ([]data.Object, error) {
	place, options, _ := strings.Cut(pattern, "?")
	query, err := url.ParseQuery(options)
	if err != nil {
		return nil, errors.New("behind ? give endpoint=URL or region=NAME")
	}
	for key := range query {
		if key != "endpoint" && key != "region" {
			return nil, fmt.Errorf("%s is not known: behind ? give endpoint=URL or region=NAME", key)
		}
	}
	name, key, _ := strings.Cut(strings.TrimPrefix(place, "s3://"), "/")
	if name == "" {
		return nil, errors.New("give s3://BUCKET/OBJECTS")
	}
	if _, err := path.Match(key, ""); err != nil {
		return nil, errors.New("is not a valid pattern")
	}
	client, err := connect(query)
	if err != nil {
		return nil, err
	}
	prefix, isPattern := key, false
	if i := strings.IndexAny(key, `*[\`); i >= 0 {
		prefix, isPattern = key[:i], true
	}
	matches := func(object string) bool {
		if isPattern {
			ok, _ := path.Match(key, object)
			return ok
		}
		below := key == "" || strings.HasPrefix(object, strings.TrimSuffix(key, "/")+"/")
		return object == key || below && !hidden(strings.TrimPrefix(object, key))
	}
	ctx, cancel := context.WithTimeout(context.Background(), listTimeout)
	defer cancel()
	var all []data.Object
	for o := range client.ListObjects(ctx, name, minio.ListObjectsOptions{Prefix: prefix, Recursive: true}) {
		switch {
		case o.Err != nil:
			return nil, o.Err
		case strings.HasSuffix(o.Key, "/") || !matches(o.Key):
			continue
		case len(all) >= maxListed:
			return nil, fmt.Errorf("names more than %d objects", maxListed)
		case o.ETag == "":
			return nil, fmt.Errorf("object %s has no ETag, which says what it holds", o.Key)
		}
		all = append(all, data.Object{
			Name: "s3://" + name + "/" + o.Key, Size: o.Size, Version: o.ETag, Content: &object{minio.Core{Client: client}, name, o.Key, o.ETag},
		})
	}
	return all, ctx.Err()
}

// hidden reports whether a part of a name below a folder begins with a dot, as of files.
func hidden(below string) bool { return strings.HasPrefix(below, ".") || strings.Contains(below, "/.") }

func connect(query url.Values) (*minio.Client, error) {
	server, err := url.Parse(cmp.Or(query.Get("endpoint"), os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"), "https://s3.amazonaws.com"))
	if err != nil || server.Host == "" || server.Scheme != "https" && server.Scheme != "http" {
		return nil, errors.New("endpoint is not the URL of a server: give https://HOST or http://HOST:PORT")
	}
	if err := find.Credentials("AWS_SHARED_CREDENTIALS_FILE"); err != nil {
		return nil, err
	}
	return minio.New(server.Host, &minio.Options{
		Secure: server.Scheme == "https",
		Region: cmp.Or(query.Get("region"), os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION")),
		Creds: credentials.NewChainCredentials([]credentials.Provider{
			&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{},
		}),
		MaxRetries: 3, // a run tries again
	})
}

// object reads an object by position.
type object struct {
	client       minio.Core
	bucket, name string
	version      string
}

func (o *object) ReadAt(p []byte, at int64) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	var opts minio.GetObjectOptions
	if err := errors.Join(opts.SetRange(at, at+int64(len(p))-1), opts.SetMatchETag(o.version)); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	content, _, _, err := o.client.GetObject(ctx, o.bucket, o.name, opts)
	if err != nil {
		if minio.ToErrorResponse(err).StatusCode == 412 {
			return 0, errors.New("the object has changed")
		}
		return 0, err
	}
	defer content.Close()
	return io.ReadFull(content, p)
}
