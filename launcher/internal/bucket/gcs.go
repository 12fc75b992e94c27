package bucket

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"

	"google.golang.org/api/googleapi"
	"google.golang.org/api/option"
	"google.golang.org/api/storage/v1"

	"github.com/soliton-train/soliton/internal/store/archive"
)

// openGCS opens a folder of a bucket of Google Cloud Storage. The credentials are the application default credentials of Google's clients:
// the file that GOOGLE_APPLICATION_CREDENTIALS names, that of gcloud, or the service account of the machine. STORAGE_EMULATOR_HOST
// names a server that asks for none.
func openGCS(text, bucket, prefix string, _ url.Values) (archive.Bucket, error) {
	g := &gcs{bucket: bucket, prefix: prefix, text: text}
	if host := os.Getenv("STORAGE_EMULATOR_HOST"); host != "" {
		if !strings.Contains(host, "://") {
			host = "http://" + host
		}
		u, err := server(host)
		if err != nil {
			return nil, errors.New("STORAGE_EMULATOR_HOST is not the address of a server: give HOST:PORT")
		}
		g.options = []option.ClientOption{option.WithoutAuthentication(), option.WithEndpoint(u.Scheme + "://" + u.Host + "/storage/v1/")}
	} else {
		g.options = []option.ClientOption{option.WithScopes(storage.DevstorageReadWriteScope)}
	}
	return g, nil
}

// gcs is a folder of a bucket.
type gcs struct {
	bucket, prefix string
	text           string
	options        []option.ClientOption

	mu     sync.Mutex
	client *storage.Service // once credentials were found, which may ask the machine's metadata server
}

func (g *gcs) String() string { return g.text }

// objects returns the client.
func (g *gcs) objects() (*storage.ObjectsService, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.client == nil {
		client, err := storage.NewService(context.Background(), g.options...) // later requests refresh tokens under this context
		if err != nil {
			return nil, fmt.Errorf("no credentials: set GOOGLE_APPLICATION_CREDENTIALS: %w", line(err))
		}
		g.client = client
	}
	return g.client.Objects, nil
}

// fault says what the error of the server means.
func (g *gcs) fault(name string, err error) error {
	if err == nil {
		return nil
	}
	var answer *googleapi.Error
	if !errors.As(err, &answer) {
		return fmt.Errorf("%s: %w", name, line(err))
	}
	said := cmp.Or(answer.Message, answer.Body)
	switch {
	case answer.Code == http.StatusPreconditionFailed:
		return fmt.Errorf("%s: %w", name, archive.ErrExists)
	case answer.Code == http.StatusNotFound && (strings.HasSuffix(name, "/") || strings.Contains(said, "bucket does not exist")):
		return noBucket(g.bucket)
	case answer.Code == http.StatusNotFound:
		return fmt.Errorf("%s: %w", name, archive.ErrMissing)
	case answer.Code == http.StatusUnauthorized || answer.Code == http.StatusForbidden:
		return refused(fmt.Sprint(answer.Code, " ", line(errors.New(said))), "GOOGLE_APPLICATION_CREDENTIALS, and what the account may do")
	}
	return fmt.Errorf("%s: %w", name, line(err))
}

func (g *gcs) Put(ctx context.Context, name string, content io.ReadSeeker, size int64) error {
	return g.insert(ctx, name, content, size, "application/octet-stream", func(c *storage.ObjectsInsertCall) {})
}

func (g *gcs) Create(ctx context.Context, name string, content []byte) error {
	return g.insert(ctx, name, bytes.NewReader(content), int64(len(content)), "application/json", func(c *storage.ObjectsInsertCall) {
		c.IfGenerationMatch(0) // there is none
	})
}

// insert writes an object, in parts of 16 MiB that are tried again for half a minute each.
func (g *gcs) insert(ctx context.Context, name string, content io.Reader, size int64, kind string, with func(*storage.ObjectsInsertCall)) error {
	objects, err := g.objects()
	if err != nil {
		return err
	}
	call := objects.Insert(g.bucket, &storage.Object{Name: g.prefix + name}).Context(ctx).Fields("size").
		Media(content, googleapi.ContentType(kind), googleapi.EnableAutoChecksum())
	with(call)
	made, err := call.Do()
	if err != nil {
		return g.fault(name, err)
	}
	if made.Size != uint64(size) {
		return fmt.Errorf("%s: %d bytes arrived, of %d", name, made.Size, size)
	}
	return nil
}

func (g *gcs) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	objects, err := g.objects()
	if err != nil {
		return nil, err
	}
	r, err := objects.Get(g.bucket, g.prefix+name).Context(ctx).Download()
	if err != nil {
		return nil, g.fault(name, err)
	}
	return r.Body, nil
}

func (g *gcs) List(ctx context.Context, folder string) (names []string, err error) {
	objects, err := g.objects()
	if err != nil {
		return nil, err
	}
	err = objects.List(g.bucket).Prefix(g.prefix+folder).Fields("items/name", "nextPageToken").Pages(ctx, func(page *storage.Objects) error {
		for _, o := range page.Items {
			names = append(names, strings.TrimPrefix(o.Name, g.prefix))
		}
		if len(names) > maxListed {
			return fmt.Errorf("it has more than %d objects", maxListed)
		}
		return nil
	})
	return names, g.fault(folder, err)
}

func (g *gcs) Delete(ctx context.Context, name string) error {
	objects, err := g.objects()
	if err != nil {
		return err
	}
	err = g.fault(name, objects.Delete(g.bucket, g.prefix+name).Context(ctx).Do())
	if errors.Is(err, archive.ErrMissing) {
		return nil
	}
	return err
}
