// Package dashboard serves the page that shows a run and lets people act on it.
//
// A [Server] is one more [view.View]: it takes in the same events as the terminal's. Pages
// hear of them by server-sent events, at most ten frames a second, each with what is new
// since the one before; a page that comes late or comes back gets everything first. All that is kept is bounded.
//
// # Permissions
//
// Reading needs nothing but a connection, so the server listens on the loopback interface unless it is told
// otherwise. Whatever changes the run is a POST of an [Action] that carries the run's token, 32 random bytes which lie in
// a file that only its owner can read. [Server.Link] has the token in the URL's fragment, which browsers do not
// send; the page moves it into its session's storage and sends it as a header. Browsers must also be
// on a page of this origin (net/http.CrossOriginProtection). Every request has to name the server as this machine is
// named, so that a foreign name that is made to point here reads nothing and changes nothing.
//
// The page is plain files without a build step, and asks no other machine for anything; its
// content security policy allows it nothing else, and no inline scripts or styles.
//
// # Life
//
// [Listen] opens the port and serves. [Server.Attach] names the run as soon as there is one to act on.
// Close tells every page the last state, ends the connections and joins all goroutines.
package dashboard
