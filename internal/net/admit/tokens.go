package admit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math"
	"time"
)

// Errors of a server about a token.
var (
	ErrToken   = errors.New("the run does not know the ticket: it may have started again since, so ask for a new ticket")
	ErrExpired = errors.New("the ticket has expired: ask for a new one")
)

// issuer makes and judges tokens, with a key that all machines of a run have: a token holds when it expires (uint32, seconds since
// 1970, big-endian) and 12 bytes of the HMAC-SHA256 of that.
type issuer struct{ key []byte }

func (i issuer) issue(until time.Time) (t Token) {
	binary.BigEndian.PutUint32(t[:4], uint32(min(max(until.Unix(), 0), math.MaxUint32)))
	i.sign(&t)
	return t
}

func (i issuer) sign(t *Token) {
	mac := hmac.New(sha256.New, i.key)
	mac.Write(t[:4])
	copy(t[4:], mac.Sum(nil))
}

// judge returns nil for a token that lives, ErrExpired for one that did, and else ErrToken.
func (i issuer) judge(t Token, now time.Time) error {
	want := t
	i.sign(&want)
	switch {
	case !hmac.Equal(want[:], t[:]):
		return ErrToken
	case now.Unix() >= int64(binary.BigEndian.Uint32(t[:4])):
		return ErrExpired
	}
	return nil
}
